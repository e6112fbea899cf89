"""What `generate` has prepared, as sequences of the engine; what cannot be followed is refused here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LogitsProcessorList, StoppingCriteriaList

from foredraft.drafters.base import Drafter
from foredraft.engine.controller import Controller
from foredraft.engine.costs import MAX_ROWS, ROWS, PassCosts, measure_pass_costs
from foredraft.engine.detokenize import Detokenizer
from foredraft.engine.scheduler import Scheduler
from foredraft.engine.sequence import Sequence as EngineSequence
from foredraft.engine.step import Engine
from foredraft.errors import ParameterError, UnsupportedModelError
from foredraft.hf.pictures import find_pictures, inputs_beside, seen_by_both
from foredraft.hf.sampler import Process, Record, make_process, sampler_class
from foredraft.kvcache.blocks import BlockPool, SlotTable, num_blocks_for
from foredraft.models.hf.model import HFModel
from foredraft.types import MAX_DRAFT, Picture, PicturePrompt, SamplingParams, pictures_of

#: Rows of prompts in one pass.
MAX_NUM_BATCHED_TOKENS = 512
#: Attribute of a model: what its passes cost, by how they are run, followed from call to call.
_COSTS = "_foredraft_pass_costs"


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of `input_ids` [B, padded], and how their texts go on. Lists have an entry a row."""

    model: Any
    input_ids: torch.Tensor
    prompts: Sequence[Sequence[int]]  # without padding
    max_lengths: Sequence[int]  # tokens without padding, prompt and answer
    processes: Sequence[Process]
    records: Sequence[Record] | None  # if scores or logits are wanted
    stopping_criteria: StoppingCriteriaList
    stop_ids: frozenset[int]  # of the criteria; after one of them a row is padded
    generation_config: Any

    @property
    def num_blocks(self) -> int:
        """Of a cache that holds all texts, with a draft behind each."""
        return sum(num_blocks_for(length + MAX_DRAFT) for length in self.max_lengths)

    def check_ids(self, vocab_size: int) -> None:
        """Raises ParameterError for ids that are no tokens."""
        low, high = int(self.input_ids.min()), int(self.input_ids.max())
        if low < 0 or high >= vocab_size:
            wrong = low if low < 0 else high
            raise ParameterError("input_ids", f"holds {wrong}, and the model's tokens are 0 to {vocab_size - 1}")

    def make_engine(
        self, target: HFModel, drafters: Sequence[Drafter], num_assistant_tokens: int, adaptive: bool
    ) -> Engine:
        """An engine over the target with all sequences scheduled."""
        pool = BlockPool(target.num_blocks)
        max_num_tokens = max(MAX_NUM_BATCHED_TOKENS, len(self.prompts))
        scheduler = Scheduler(pool, max_num_seqs=len(self.prompts), max_num_batched_tokens=max_num_tokens)
        costs = _pass_costs(self.model, target) if adaptive else PassCosts([1.0] * len(ROWS))
        controller = Controller(
            drafters, costs, max_draft=num_assistant_tokens, adaptive=adaptive, takes_trees=target.takes_trees
        )
        for seq in self._make_sequences(target, pool):
            scheduler.add(seq)
        return Engine(target, drafters, controller, scheduler, pool)

    def _make_sequences(self, target: HFModel, pool: BlockPool) -> list[EngineSequence]:
        params = SamplingParams(temperature=1.0 if self.generation_config.do_sample else 0.0, max_tokens=None)
        seed = int(torch.randint(2**62, (1,)).item())  # of torch's generator: torch.manual_seed makes it repeatable
        make_sampler = sampler_class(None if target.device_rows is None else target.device_rows.sampler)
        seqs = []
        for index, (prompt, process) in enumerate(zip(self.prompts, self.processes, strict=True)):
            sampler = make_sampler(
                params,
                process,
                vocab_size=target.vocab_size,
                prompt=self.input_ids[index].tolist(),
                seed=seed,
                choice=index,
                device=self.input_ids.device,
                record=None if self.records is None else self.records[index],
            )
            seqs.append(
                EngineSequence(
                    index,
                    1 + index,
                    index,
                    prompt,
                    params,
                    max_len=self.max_lengths[index],
                    sampler=sampler,
                    detokenizer=_NoText(),
                    stop_ids=self.stop_ids,
                    prediction=(),
                    table=SlotTable(pool, pictures=pictures_of(prompt)),
                )
            )
        return seqs


class _NoText(Detokenizer):
    """The texts are not wanted: criteria of `generate` look at ids."""

    def __init__(self) -> None: ...

    def feed(self, token_id: int, *, may_stop: bool = True) -> bool:
        return False


def check_inputs(device: torch.device, input_ids: Any, attention_mask: Any) -> None:
    """Raises ParameterError for what is no rectangle of ids on the model's `device`, and for a mask of another shape.

    None leaves them to `generate`.
    """
    if input_ids is None:
        return
    is_ids = isinstance(input_ids, torch.Tensor) and input_ids.dtype in (torch.int64, torch.int32)
    if not is_ids or input_ids.dim() != 2:
        raise ParameterError(
            "input_ids", "must be a tensor of token ids [rows, tokens]; what a tokenizer returns is given as **inputs"
        )
    if input_ids.shape[0] == 0:
        raise ParameterError("input_ids", "has no rows: give at least one prompt")
    if input_ids.shape[1] == 0:
        raise ParameterError("input_ids", "has no tokens: give each row at least one")
    if input_ids.device != device:
        raise ParameterError("input_ids", f"is on {input_ids.device}, and the model on {device}: move it there")
    if attention_mask is None:
        return
    if not isinstance(attention_mask, torch.Tensor) or attention_mask.shape != input_ids.shape:
        shape = tuple(input_ids.shape)
        raise ParameterError("attention_mask", f"must be a tensor of ones and zeros in the shape of input_ids, {shape}")
    if attention_mask.device.type == "meta":
        raise ParameterError("attention_mask", "has no numbers: it is on the meta device")


def make_batch(
    model: Any,
    input_ids: torch.Tensor,
    processors: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: Any,
    model_kwargs: Mapping[str, Any],
    assistant_pictures: Sequence[Sequence[Picture]] | None = None,
) -> Batch:
    """assistant_pictures: of every prompt, if the assistant sees.

    Raises UnsupportedModelError for what speculation cannot follow, ParameterError for rows without a prompt.
    """
    _refuse_others(generation_config, model_kwargs)
    inputs_beside(model, model_kwargs)
    num_rows, padded = input_ids.shape
    mask = model_kwargs.get("attention_mask")
    mask = torch.ones_like(input_ids) if mask is None else mask.to(input_ids.device)
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise ParameterError("attention_mask", "must hold ones and zeros")
    _check_padding(mask, model_kwargs.get("position_ids"))
    num_pads = [padded - int(row.sum()) for row in mask]
    wants_scores = generation_config.return_dict_in_generate and (
        generation_config.output_scores or generation_config.output_logits
    )
    ends = [criterion.eos_token_id for criterion in stopping_criteria if hasattr(criterion, "eos_token_id")]
    prompts: list[Sequence[int]] = [row[pads:].tolist() for row, pads in zip(input_ids, num_pads, strict=True)]
    pictures = find_pictures(model, input_ids, model_kwargs, "the model")
    if assistant_pictures is not None:
        pictures = _seen_by_both(pictures, assistant_pictures)
    prompts = [PicturePrompt(prompt, own) if own else prompt for prompt, own in zip(prompts, pictures, strict=True)]
    return Batch(
        model=model,
        input_ids=input_ids,
        prompts=prompts,
        max_lengths=[generation_config.max_length - pads for pads in num_pads],
        processes=[make_process(processors, index, num_rows, input_ids.device) for index in range(num_rows)],
        records=[Record() for _ in range(num_rows)] if wants_scores else None,
        stopping_criteria=stopping_criteria,
        stop_ids=frozenset(int(id) for ids in ends for id in torch.as_tensor(ids).flatten()),
        generation_config=generation_config,
    )


def _refuse_others(config: Any, model_kwargs: Mapping[str, Any]) -> None:
    if config.num_beams > 1:
        raise UnsupportedModelError("beam search cannot be speculated: leave num_beams out, or use model.generate")
    for name in ("penalty_alpha", "dola_layers"):
        if getattr(config, name, None):
            raise UnsupportedModelError(f"{name} asks for another way of decoding: leave it out, or use model.generate")
    pad = config._pad_token_tensor
    if pad is not None and int(pad) < 0:
        raise ParameterError("pad_token_id", f"must be the id of a token, not {int(pad)}")
    if config.return_dict_in_generate and (config.output_attentions or config.output_hidden_states):
        raise UnsupportedModelError(
            "attentions and hidden states of drafted passes are not those of single tokens: leave output_attentions "
            "and output_hidden_states out, or use model.generate"
        )
    for name in ("cache", "past_key_values"):
        cache = model_kwargs.get(name)
        if cache is not None and cache.get_seq_length():
            raise UnsupportedModelError(f"{name} holds a text already: give the whole text as input_ids instead")


def _seen_by_both(pictures: Sequence[Sequence[Picture]], others: Sequence[Sequence[Picture]]) -> list[list[Picture]]:
    """Each prompt's, which may stand for several rows. Raises ParameterError."""
    num_rows = len(pictures) // len(others)
    both = [seen_by_both(own, others[row // num_rows]) for row, own in enumerate(pictures)]
    if None in both:
        raise ParameterError(
            "assistant_model", "reads these images in other places than the model: choose one of the same processor"
        )
    return [own or [] for own in both]


def _check_padding(mask: torch.Tensor, position_ids: torch.Tensor | None) -> None:
    """Padding is on the left, and positions count the tokens after it."""
    if not bool(mask.any(dim=1).all()):
        raise ParameterError("attention_mask", "hides a whole row: every row needs at least one token")
    if bool((mask[:, 1:] < mask[:, :-1]).any()):
        raise ParameterError(
            "attention_mask", "has padding right of a token: pad on the left (tokenizer.padding_side = 'left')"
        )
    if position_ids is not None:
        if position_ids.dim() == 3 and position_ids.shape[0] == 4:  # the text's, then three of images
            position_ids = position_ids[0]
        expected = mask.long().cumsum(dim=1) - 1
        if bool(((position_ids.to(mask.device) != expected) & (mask != 0)).any()):
            raise UnsupportedModelError("position_ids of your own cannot be followed: leave them out")


def _pass_costs(model: Any, target: HFModel) -> PassCosts:
    """Timed in the model's first call, over the blocks that will hold its texts."""
    passes = (target.fixed_rows, target.is_packed, target.replays)
    how = (*passes, model.dtype, str(model.device), torch.get_num_threads())
    known: dict[Any, PassCosts] = model.__dict__.setdefault(_COSTS, {})
    if how not in known:
        known[how] = measure_pass_costs(target, range(min(num_blocks_for(MAX_ROWS), target.num_blocks)))
    return known[how]
