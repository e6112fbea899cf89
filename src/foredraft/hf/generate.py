"""`model.generate` with drafts: the same arguments, the same ids, fewer passes."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import LogitsProcessorList, QuantizedCache, StoppingCriteriaList
from transformers.generation.configuration_utils import ALL_CACHE_IMPLEMENTATIONS
from transformers.generation.stopping_criteria import StopStringCriteria
from transformers.generation.utils import GenerateDecoderOnlyOutput

from foredraft.algo.sampler import SamplerKind
from foredraft.drafters.base import Drafter
from foredraft.drafters.cross_vocab import CrossVocabDrafter
from foredraft.drafters.model import ModelDrafter
from foredraft.drafters.ngram import NgramDrafter
from foredraft.drafters.pair import compare_tokenizers
from foredraft.engine.llm import AUTO_DRAFT_VOCAB
from foredraft.errors import ParameterError, TokenizerMismatchError, UnsupportedModelError
from foredraft.hf.batch import Batch, check_inputs, make_batch
from foredraft.hf.columns import Columns
from foredraft.hf.pictures import model_inputs, read_prompts, reads_more
from foredraft.models.fast_tokenizer import FastTokenizer
from foredraft.models.hf.checks import check_is_whole, check_kind
from foredraft.models.hf.graphs import choose_capture
from foredraft.models.hf.load import choose_device_sampler
from foredraft.models.hf.model import HFModel
from foredraft.models.hf.packing import has_room_for
from foredraft.models.hf.probe import PictureAnswer, probe_once, probe_pictures_once
from foredraft.models.hf.tokenizer import make_tokenizer
from foredraft.models.hf.vision import can_see
from foredraft.types import MAX_DRAFT, Picture, PicturePrompt, check_whole

#: Largest draft unless the caller says otherwise.
DEFAULT_MAX_DRAFT = 16
#: Passes of a call before any is captured: what is captured serves one call, and capturing takes some passes itself.
#: More than costs are timed by, so that these are all of the same way.
NUM_UNCAPTURED = 64


@dataclass(frozen=True, slots=True)
class Speculation:
    """Who drafts, and how much."""

    assistant_model: Any = None
    tokenizers: tuple[FastTokenizer, FastTokenizer] | None = None  # the model's and the assistant's, where they differ
    prompt_lookup: bool = True
    max_matching_ngram_size: int | None = None
    num_assistant_tokens: int = DEFAULT_MAX_DRAFT
    adaptive: bool = True
    fixed_rows: bool = False
    pack_weights: bool = True
    enforce_eager: bool = False


def generate(
    model: Any,
    inputs: Any = None,
    *,
    assistant_model: Any = None,
    tokenizer: Any = None,
    assistant_tokenizer: Any = None,
    prompt_lookup_num_tokens: int | None = None,
    max_matching_ngram_size: int | None = None,
    num_assistant_tokens: int | None = None,
    adaptive: bool = True,
    fixed_rows: bool = False,
    pack_weights: bool = True,
    enforce_eager: bool = False,
    **kwargs: Any,
) -> Any:
    """What `model.generate(inputs, **kwargs)` returns, by speculative decoding.

    All of `generate`'s arguments mean what they mean there: greedy ids are equal to its ids (up to ties within the
    rounding of the model's own kernels); with do_sample=True tokens follow the same law, by draws of their own.

    assistant_model: a smaller model of the same tokenizer (its head may be padded otherwise), or of any other, where
    both tokenizers are given. prompt_lookup_num_tokens: draft so many tokens from the text itself; both may be given;
    with neither, the text itself is drafted from. num_assistant_tokens: the longest draft; 0 drafts nothing. These, and
    max_matching_ngram_size, may stand in a GenerationConfig as well. adaptive: measured costs and acceptance shorten
    drafts; False always drafts the longest. fixed_rows: every pass is filled up to the rows of a draft of
    DEFAULT_MAX_DRAFT, or of the longest if that has more, so that a text has the same bits whatever drafts.
    pack_weights: on a CPU, keep a second copy of the weights of linear layers as torch's kernels read them fastest, as
    long as the model lives; half of the memory that is left must hold it. enforce_eager: no CUDA graphs, which short
    passes on a GPU are captured in. tokenizer: needed for stop_strings.

    Raises UnsupportedModelError for models and arguments that speculation cannot follow, ParameterError,
    TokenizerMismatchError.
    """
    check_kind(model, "the model")
    check_is_whole(model, "the model")
    if assistant_model is not None:
        check_kind(assistant_model, "assistant_model")
        check_is_whole(assistant_model, "assistant_model")
    check_inputs(model.device, kwargs.get("input_ids") if inputs is None else inputs, kwargs.get("attention_mask"))
    flags = {
        "adaptive": adaptive,
        "fixed_rows": fixed_rows,
        "pack_weights": pack_weights,
        "enforce_eager": enforce_eager,
    }
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise ParameterError(name, "must be true or false")
    config = kwargs.get("generation_config") or model.generation_config
    if num_assistant_tokens is None:
        num_assistant_tokens = _set_length(config, assistant_model)
    prompt_lookup_num_tokens = _first_given(prompt_lookup_num_tokens, config.prompt_lookup_num_tokens)
    max_matching_ngram_size = _first_given(max_matching_ngram_size, config.max_matching_ngram_size)
    lengths = [n for n in (num_assistant_tokens, prompt_lookup_num_tokens) if n is not None]
    if any(type(n) is not int or not 0 <= n <= MAX_DRAFT for n in lengths):
        raise ParameterError("num_assistant_tokens", f"and prompt_lookup_num_tokens must lie between 0 and {MAX_DRAFT}")
    if max_matching_ngram_size is not None:
        check_whole("max_matching_ngram_size", max_matching_ngram_size, 1)
    speculation = Speculation(
        assistant_model,
        _different_tokenizers(tokenizer, assistant_tokenizer),
        prompt_lookup=prompt_lookup_num_tokens is not None or assistant_model is None,
        max_matching_ngram_size=max_matching_ngram_size,
        num_assistant_tokens=max(lengths, default=DEFAULT_MAX_DRAFT),
        adaptive=adaptive,
        fixed_rows=fixed_rows,
        pack_weights=pack_weights,
        enforce_eager=enforce_eager,
    )
    if kwargs.get("custom_generate") is not None:
        raise UnsupportedModelError("custom_generate decodes by itself: leave it out, or use model.generate")
    streamer = kwargs.get("streamer")
    pictures = _look(model, assistant_model, inputs, kwargs)
    kwargs = _without_cache(model, _without_what_is_done_here(tokenizer, kwargs))

    def decode(
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> Any:
        batch = make_batch(
            model, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs, pictures
        )
        columns = Columns(batch, streamer)
        _run(model, batch, columns, speculation)
        return _output(columns, generation_config)

    return model.generate(inputs, custom_generate=decode, **kwargs)


def _look(model: Any, assistant_model: Any, inputs: Any, kwargs: Mapping[str, Any]) -> list[list[Picture]] | None:
    """Before an image is first read: whether the model's passes over images are its own, and what the assistant sees.

    Returns the assistant's pictures of each prompt; None if it reads texts only.
    """
    own = model_inputs(model, kwargs)
    if not can_see(model) or not reads_more(own):
        return None
    probe_pictures_once(model, partial(_answer_to_image, model, inputs, own), name="the model")
    if assistant_model is None or not can_see(assistant_model):
        return None
    try:
        return read_prompts(assistant_model, inputs, model_inputs(assistant_model, kwargs), "assistant_model")
    except UnsupportedModelError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise ParameterError(
            "assistant_model", f"cannot read these images: {reason}; choose one of the same processor"
        ) from None


def _answer_to_image(model: Any, inputs: Any, arguments: Mapping[str, Any]) -> PictureAnswer | None:
    """What `generate` itself says to the first prompt with an image."""
    pictures = read_prompts(model, inputs, arguments, "the model")
    row = next((row for row, own in enumerate(pictures) if own), None)
    if row is None:
        return None
    own = model.generate(
        inputs,
        **arguments,
        do_sample=False,
        min_new_tokens=3,
        max_new_tokens=3,
        return_dict_in_generate=True,
        output_logits=True,
    )
    text, answer = own.sequences[row, :-3], own.sequences[row, -3:-1].tolist()
    mask = arguments.get("attention_mask")
    prompt = text[-int(mask[row].sum()) :] if mask is not None else text
    logits = [step[row].float().cpu().numpy() for step in own.logits]
    return PictureAnswer(PicturePrompt(prompt.tolist(), pictures[row]), answer, logits)


def _run(model: Any, batch: Batch, columns: Columns, speculation: Speculation) -> None:
    """Fill the columns. The engine computes; `columns` decides, as `generate` does, when it is over."""
    target = _target_runner(model, batch, speculation)
    drafters = _make_drafters(batch, target, speculation)
    engine = batch.make_engine(target, drafters, speculation.num_assistant_tokens, speculation.adaptive)
    while not columns.commit():
        for seq in engine.scheduler.unfinished():
            if columns.is_padded(seq.index):
                engine.abort(seq)
        if not engine.scheduler.unfinished():
            raise RuntimeError("a text has ended before the stopping criteria saw that")
        for step in engine.step():
            if step.seq.error is not None:
                raise step.seq.error
            columns.extend(step.seq.index, step.seq.tokens[len(step.seq.tokens) - step.num_new :])


def _target_runner(model: Any, batch: Batch, speculation: Speculation) -> HFModel:
    num_rows = 1 + max(speculation.num_assistant_tokens, DEFAULT_MAX_DRAFT) if speculation.fixed_rows else 0
    sampler = choose_device_sampler(model.device)
    runner = _make_runner(model, "the model", batch.num_blocks, sampler, speculation, fixed_rows=num_rows)
    batch.check_ids(runner.vocab_size)
    longest = max(batch.max_lengths)
    if longest > runner.max_model_len:
        raise ParameterError(
            "max_length", f"asks for {longest} tokens, and the model reaches {runner.max_model_len}: ask for fewer"
        )
    return runner


def _make_runner(
    model: Any,
    name: str,
    num_blocks: int,
    sampler: SamplerKind | None,
    speculation: Speculation,
    fixed_rows: int = 0,
) -> HFModel:
    probe_once(model, name=name)
    return HFModel(
        model,
        name=name,
        num_blocks=num_blocks,
        fixed_rows=fixed_rows,
        device_sampler=sampler,
        packed=speculation.pack_weights and has_room_for(model),
        capture=choose_capture(model, enforce_eager=speculation.enforce_eager),
        num_uncaptured=NUM_UNCAPTURED,
    )


def _make_drafters(batch: Batch, target: HFModel, speculation: Speculation) -> list[Drafter]:
    drafters: list[Drafter] = []
    if speculation.num_assistant_tokens == 0:
        return drafters
    if speculation.prompt_lookup:
        default = NgramDrafter.DEFAULT_MAX_MATCH
        longest = min(speculation.max_matching_ngram_size or default, default)
        drafters.append(NgramDrafter(min_match=1, max_match=longest))  # as `generate` looks them up
    if speculation.assistant_model is not None:
        drafters.append(_make_model_drafter(batch, target, speculation))
    return drafters


def _make_model_drafter(batch: Batch, target: HFModel, speculation: Speculation) -> Drafter:
    """Where its context ends, it drafts no more."""
    model, name = speculation.assistant_model, "assistant_model"
    sampler = None if target.device_rows is None else target.device_rows.sampler  # rows are brought where they are read
    if speculation.tokenizers is None:
        assistant = _make_runner(model, name, batch.num_blocks, sampler, speculation)
        head_size = AUTO_DRAFT_VOCAB if assistant.vocab_size > AUTO_DRAFT_VOCAB else None
        return ModelDrafter("model", assistant, target.vocab_size, head_size=head_size, sees=assistant.can_see)
    ours, theirs = speculation.tokenizers
    num_blocks = 2 * batch.num_blocks  # texts may take more of its own tokens
    assistant = _make_runner(model, name, num_blocks, sampler, speculation)
    return CrossVocabDrafter("model", assistant, theirs, target, ours, native=False)


def _different_tokenizers(tokenizer: Any, assistant_tokenizer: Any) -> tuple[FastTokenizer, FastTokenizer] | None:
    """Raises ParameterError without one of them, TokenizerMismatchError where no text crosses."""
    if assistant_tokenizer is None:
        return None
    if tokenizer is None:
        raise ParameterError("tokenizer", "must be given with assistant_tokenizer, so that texts can cross")
    ours, theirs = make_tokenizer(tokenizer), make_tokenizer(assistant_tokenizer)
    pair = compare_tokenizers("the model", ours, "assistant_model", theirs)
    if pair.kind == "impossible":
        raise TokenizerMismatchError(f"{pair}; choose another, or leave it out and draft from the text itself")
    return (ours, theirs) if pair.kind == "cross-vocabulary" else None


def _first_given(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _set_length(config: Any, assistant_model: Any) -> int | None:
    """The longest draft by the settings of the call, or of the assistant, where `generate` looks for it."""
    own = None if assistant_model is None else assistant_model.generation_config.num_assistant_tokens
    length: int | None = _first_given(config.num_assistant_tokens, own)
    return length


def _without_what_is_done_here(tokenizer: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """`generate` loses the tokenizer where it hands decoding over, so stop strings become a criterion here; and where
    its settings ask for drafts it would refuse what it cannot do with drafts of its own."""
    config = kwargs.get("generation_config")
    texts = kwargs.get("stop_strings") or getattr(config, "stop_strings", None)
    kwargs = kwargs | {"stop_strings": None}
    if config is not None:
        config = copy.deepcopy(config)
        config.stop_strings = config.prompt_lookup_num_tokens = None
        kwargs["generation_config"] = config
    if texts is None:
        return kwargs
    if tokenizer is None:
        raise ParameterError("tokenizer", "must be given with stop_strings")
    criteria = [*(kwargs.get("stopping_criteria") or []), StopStringCriteria(tokenizer, texts)]
    return kwargs | {"stopping_criteria": StoppingCriteriaList(criteria)}


def _without_cache(model: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Keys and values are kept in blocks, of the model's own type, whatever kind of cache is asked for.

    Raises UnsupportedModelError for one that would round them, ParameterError for one that `generate` does not know.
    """
    settings = kwargs.get("generation_config") or model.generation_config
    kind = _first_given(kwargs.get("cache_implementation"), settings.cache_implementation)
    if kind == "quantized" or any(
        isinstance(kwargs.get(name), QuantizedCache) for name in ("cache", "past_key_values")
    ):
        raise UnsupportedModelError(
            "a quantised cache rounds keys and values, and passes here do not: leave it out, or use model.generate"
        )
    if kind is not None and kind not in ALL_CACHE_IMPLEMENTATIONS:
        raise ParameterError("cache_implementation", f"must be one of {', '.join(ALL_CACHE_IMPLEMENTATIONS)}")
    return kwargs if kind is None else kwargs | {"cache_implementation": "dynamic"}  # the one that costs nothing


def _output(columns: Columns, generation_config: Any) -> Any:
    if not generation_config.return_dict_in_generate:
        return columns.ids
    made: Any = GenerateDecoderOnlyOutput  # its annotations are narrower than what generate itself puts there
    return made(sequences=columns.ids, scores=columns.scores, logits=columns.logits)
