"""Prompts through an engine: text, ids or chats in, completions out, blocking or streamed."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Generator as Stream
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import count
from numbers import Integral
from typing import TYPE_CHECKING, Any, NoReturn, get_args

from foredraft.algo.sampler import RejectionMethod, SamplerKind, make_sampler
from foredraft.drafters.base import Drafter
from foredraft.engine.controller import Controller
from foredraft.engine.costs import MAX_ROWS, measure_pass_costs
from foredraft.engine.detokenize import Detokenizer
from foredraft.engine.grammar import Grammar, GrammarCompiler
from foredraft.engine.scheduler import Scheduler
from foredraft.engine.sequence import Sequence
from foredraft.engine.stats import EngineSnapshot, Round
from foredraft.engine.step import Engine, Step
from foredraft.errors import ParameterError, PromptTooLongError
from foredraft.kvcache.blocks import BlockPool, SlotTable, num_blocks_for
from foredraft.models.base import BLOCK_SIZE, ImageReader, LanguageModel, TextTokenizer
from foredraft.models.chat_template import encode_chat
from foredraft.types import (
    MAX_DRAFT,
    Chunk,
    Completion,
    PicturePrompt,
    SamplingParams,
    Usage,
    check_choice,
    check_whole,
    pictures_of,
)

if TYPE_CHECKING:
    from typing_extensions import Self

Prompt = str | SequenceOf[int]
Message = Mapping[str, Any]
ChunkStream = Stream[Chunk, None, None]

DEFAULT_MAX_DRAFT = 16


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """Prompts that can run with these parameters. What takes long is done: see `Generator.prepare`."""

    prompts: SequenceOf[SequenceOf[int]]
    params: SamplingParams
    grammar: Grammar | None  # each choice takes a fork
    prediction: SequenceOf[int]


class Generator:
    """The part of `LLM` that needs no files. Not thread-safe.

    `submit`, `step` and `abort` never wait; `stream` and what stands on it drive them. Several streams may be open at
    once; whichever is read drives the engine for all of them.
    """

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: TextTokenizer,
        drafters: SequenceOf[Drafter] = (),
        *,
        num_speculative_tokens: int | None = None,
        rejection_sample_method: RejectionMethod = "standard",
        adaptive: bool = True,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 512,
        enable_prefix_caching: bool = True,
        native: bool = True,
        images: ImageReader | None = None,
        load_s: float = 0.0,
    ) -> None:
        max_draft = DEFAULT_MAX_DRAFT if num_speculative_tokens is None else num_speculative_tokens
        check_whole("num_speculative_tokens", max_draft, 0, MAX_DRAFT)
        check_whole("max_num_seqs", max_num_seqs, 1)
        check_whole("max_num_batched_tokens", max_num_batched_tokens, 1)
        check_choice("rejection_sample_method", rejection_sample_method, get_args(RejectionMethod))
        self.model = model
        self.tokenizer = tokenizer
        self.images = images  # None: the model reads text only
        self.max_num_seqs = max_num_seqs
        self._grammars = GrammarCompiler(tokenizer, model.vocab_size)
        self._method: RejectionMethod = rejection_sample_method
        rows = model.device_rows
        self._sampler_kind: SamplerKind = "native" if native else "array"  # for numpy rows, on which the core works
        self._sampler_device: str | None = None
        if rows is not None:
            self._sampler_kind, self._sampler_device = rows.sampler, rows.device
        self._load_s = load_s
        pool = BlockPool(model.num_blocks, shares=enable_prefix_caching)
        scheduler = Scheduler(pool, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens)
        costs = measure_pass_costs(model, range(min(num_blocks_for(MAX_ROWS), model.num_blocks)))
        controller = Controller(drafters, costs, max_draft=max_draft, adaptive=adaptive, takes_trees=model.takes_trees)
        self.engine = Engine(model, drafters, controller, scheduler, pool)
        self._request_ids = count(1)  # people see them in notes
        self._sequence_ids = count()
        self._round_hook: Callable[[Round], None] | None = None
        self._inboxes: dict[int, deque[Chunk]] = {}  # request -> chunks that its open stream has not yielded yet

    def generate(self, prompts: Prompt | SequenceOf[Prompt], params: SamplingParams | None = None) -> list[Completion]:
        """Complete every prompt (text or token ids, as they are). In order of prompts, `params.n` completions each."""
        chunks = self.stream(prompts, params)
        done = [chunk for chunk in chunks if chunk.completion is not None]
        done.sort(key=lambda chunk: (chunk.request_id, chunk.index))
        return [chunk.completion for chunk in done if chunk.completion is not None]

    def stream(self, prompts: Prompt | SequenceOf[Prompt], params: SamplingParams | None = None) -> ChunkStream:
        """The same, as it comes. Closing the iterator early aborts what is left.

        Raises PromptTooLongError or ParameterError before anything runs.
        """
        prepared = self.prepare(self._token_ids(prompts), _checked_params(params))
        return self._run(self._make_sequences(prepared))

    def chat(
        self,
        messages: SequenceOf[Message],
        params: SamplingParams | None = None,
        *,
        tools: SequenceOf[Mapping[str, Any]] | None = None,
    ) -> list[Completion]:
        """Answer a chat, through the model's own template. tools: what the model may call, as OpenAI writes them.

        To a model that sees, a content may be a list of parts: {"type": "text", "text": …}, and images as OpenAI writes
        them, {"type": "image_url", "image_url": {"url": "data:image/png;base64,…"}}, or {"type": "image", "image": …}
        with a path or an image of Pillow. Remote images are not fetched.
        """
        return self.generate(self.render_chat(messages, tools=tools), params)

    def stream_chat(
        self,
        messages: SequenceOf[Message],
        params: SamplingParams | None = None,
        *,
        tools: SequenceOf[Mapping[str, Any]] | None = None,
    ) -> ChunkStream:
        """The same, as it comes; see `stream`."""
        return self.stream(self.render_chat(messages, tools=tools), params)

    def render_chat(
        self, messages: SequenceOf[Message], *, tools: SequenceOf[Mapping[str, Any]] | None = None
    ) -> SequenceOf[int]:
        """Token ids of a chat, ready for the answer. Raises ParameterError, ChatTemplateError, PromptTooLongError."""
        return encode_chat(
            self.tokenizer, messages, tools=tools, check=self.refuse_overlong, images=self.images, files=True
        )

    def submit(
        self, prompt_ids: SequenceOf[int], params: SamplingParams | None = None, *, cache_salt: str = ""
    ) -> list[Sequence]:
        """Queue the choices of one prompt, to be computed by calls of `step`.

        cache_salt: cached prefixes are shared only among requests of one salt. Raises PromptTooLongError,
        ParameterError.
        """
        return self.submit_prepared(self.prepare([prompt_ids], _checked_params(params)), cache_salt=cache_salt)

    def prepare(self, prompts: SequenceOf[SequenceOf[int]], params: SamplingParams) -> PreparedRequest:
        """Check a request, compile its grammar, and turn its prediction into tokens.

        Unlike all else it may be called in any thread, while others step: a large grammar takes seconds. Raises
        PromptTooLongError, ParameterError.
        """
        self._check_prompts(prompts)
        self._check_params(params)
        wanted = params.structured_outputs
        grammar = self._grammars.compile(wanted) if wanted is not None else None
        longest = self.capacity * self.tokenizer.max_token_length  # no answer is longer
        prediction = self.tokenizer.encode(params.prediction[:longest]) if params.prediction else []
        return PreparedRequest(prompts, params, grammar, prediction[: self.capacity])

    def submit_prepared(self, request: PreparedRequest, *, cache_salt: str = "") -> list[Sequence]:
        """As `submit`: the choices of the first prompt, then those of the next."""
        seqs = self._make_sequences(request, cache_salt)
        self._schedule(seqs)
        return seqs

    def prepare_grammars(self) -> None:
        """Do now what the first grammar would wait for."""
        self._grammars.build_vocabulary()

    def refuse_overlong(self, text: str) -> None:
        """Spares a text that cannot fit its way through the tokenizer. Raises PromptTooLongError."""
        if len(text) > self.capacity * self.tokenizer.max_token_length:
            self._refuse_length(f"{len(text)} characters")

    def step(self) -> list[Chunk]:
        """One pass: a chunk of every answer that grew or ended. A sequence that failed has its error in its chunk."""
        steps = self.engine.step()
        chunks = [self._make_chunk(step) for step in steps if step.num_new or step.seq.error is not None]
        for chunk in chunks:
            if chunk.request_id in self._inboxes:
                self._inboxes[chunk.request_id].append(chunk)
        if self._round_hook is not None:
            for step in steps:
                self._round_hook(step.round)
        return chunks

    def abort(self, request_id: int) -> None:
        """Stop all choices of a request, if it still runs: its blocks are free at once, and it has no further chunk."""
        self._abort([seq for seq in self.engine.scheduler.unfinished() if seq.request_id == request_id])

    @property
    def capacity(self) -> int:
        """Tokens of one prompt and its answer that fit."""
        return min(self.model.max_model_len, self.model.num_blocks * BLOCK_SIZE)

    @property
    def has_unfinished(self) -> bool:
        return self.engine.scheduler.has_unfinished

    def snapshot(self) -> EngineSnapshot:
        return self.engine.scheduler.snapshot()

    def close(self) -> None:
        """Abort whatever runs and give back all that it held. Open streams end."""
        self._abort(self.engine.scheduler.unfinished())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def on_round(self, hook: Callable[[Round], None] | None) -> None:
        """Call `hook` with every sequence's share of every pass."""
        self._round_hook = hook

    def _token_ids(self, prompts: Prompt | SequenceOf[Prompt]) -> list[SequenceOf[int]]:
        return [self._encode(prompt) if isinstance(prompt, str) else prompt for prompt in _as_list(prompts)]

    def _encode(self, prompt: str) -> list[int]:
        self.refuse_overlong(prompt)
        return self.tokenizer.encode(prompt, add_special=True)

    def _check_prompts(self, prompts: SequenceOf[SequenceOf[int]]) -> None:
        for prompt in prompts:
            if not prompt:
                raise ParameterError("prompt", "is empty: give at least one token")
            if len(prompt) >= self.capacity:
                self._refuse_length(f"{len(prompt)} tokens")
            if not all(0 <= t < self.model.vocab_size for t in prompt):
                raise ParameterError("prompt", f"has token ids outside 0 .. {self.model.vocab_size - 1}")

    def _refuse_length(self, length: str) -> NoReturn:
        raise PromptTooLongError(
            f"the prompt has {length} and the context holds {self.capacity} tokens with the answer: "
            f"shorten the prompt{_advise_more(self.model)}"
        )

    def _check_params(self, params: SamplingParams) -> None:
        """For what only this model and these drafters can tell."""
        for token in params.logit_bias:
            if not 0 <= token < self.model.vocab_size:
                raise ParameterError("logit_bias", f"names token {token}, outside 0 .. {self.model.vocab_size - 1}")
        known = [drafter.name for drafter in self.engine.drafters]
        for name in params.drafters or ():
            if name not in known:
                raise ParameterError("drafters", f"names {name!r}; this engine has {', '.join(known) or 'none'}")

    def _make_sequences(self, request: PreparedRequest, cache_salt: str = "") -> list[Sequence]:
        """All choices, not yet scheduled."""
        return [seq for prompt in request.prompts for seq in self._make_choices(prompt, request, cache_salt)]

    def _make_choices(self, prompt: SequenceOf[int], request: PreparedRequest, cache_salt: str) -> list[Sequence]:
        """Of one prompt."""
        params, grammar = request.params, request.grammar
        room = self.capacity - len(prompt)
        request_id = next(self._request_ids)
        seed = params.seed if params.seed is not None else secrets.randbits(64)
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.tokenizer.eos_ids)
        return [
            Sequence(
                next(self._sequence_ids),
                request_id,
                index,
                prompt,
                params,
                max_len=len(prompt) + min(room, params.max_tokens or room),
                sampler=make_sampler(
                    params,
                    vocab_size=self.model.vocab_size,
                    prompt=prompt,
                    seed=seed,
                    choice=index,
                    eos_ids=sorted(stop_ids),
                    method=self._method,
                    kind=self._sampler_kind,
                    device=self._sampler_device,
                ),
                detokenizer=Detokenizer(self.tokenizer, params.stop),
                stop_ids=stop_ids,
                prediction=request.prediction,
                table=SlotTable(self.engine.pool, cache_salt, pictures_of(prompt)),
                grammar=grammar.fork() if grammar is not None else None,
            )
            for index in range(params.n)
        ]

    def _run(self, seqs: list[Sequence]) -> ChunkStream:
        """Schedule, and yield the chunks of these sequences until all have finished."""
        inbox: deque[Chunk] = deque()
        self._inboxes |= {seq.request_id: inbox for seq in seqs}
        self._schedule(seqs)
        try:
            while True:
                while inbox:
                    chunk = inbox.popleft()
                    if chunk.error is not None:
                        raise chunk.error
                    yield chunk
                if all(seq.finish_reason is not None for seq in seqs):
                    return
                self.step()
        finally:
            self._abort(seqs)
            for seq in seqs:
                self._inboxes.pop(seq.request_id, None)

    def _schedule(self, seqs: SequenceOf[Sequence]) -> None:
        for seq in seqs:
            seq.stats.start()
            self.engine.scheduler.add(seq)

    def _abort(self, seqs: SequenceOf[Sequence]) -> None:
        for seq in seqs:
            self.engine.abort(seq)

    def _make_chunk(self, step: Step) -> Chunk:
        seq = step.seq
        finished = seq.finish_reason is not None
        if finished and seq.detokenizer.finish() and seq.error is None:
            seq.finish_reason = "stop"
        return Chunk(
            request_id=seq.request_id,
            index=seq.index,
            text=seq.detokenizer.take(final=finished),
            token_ids=tuple(seq.tokens[len(seq.tokens) - step.num_new :]),
            origins=tuple(seq.origins[len(seq.origins) - step.num_new :]),
            num_draft_tokens=len(step.round.proposed),
            finish_reason=seq.finish_reason,
            completion=self._make_completion(seq) if finished else None,
            error=seq.error,
            logprobs=tuple(seq.logprobs[len(seq.logprobs) - step.num_new :])
            if seq.params.logprobs is not None
            else None,
        )

    def _make_completion(self, seq: Sequence) -> Completion:
        if seq.finish_reason is None:
            raise RuntimeError("a running sequence has no completion yet")
        return Completion(
            index=seq.index,
            text=seq.detokenizer.text,
            token_ids=tuple(seq.output),
            finish_reason=seq.finish_reason,
            usage=Usage(seq.num_prompt_tokens, len(seq.output), seq.num_cached_tokens),
            origins=tuple(seq.origins),
            speculation=seq.stats.speculation(seq.origins),
            timing=seq.stats.timing(self._load_s, len(seq.output)),
            logprobs=tuple(seq.logprobs) if seq.params.logprobs is not None else None,
        )


def _advise_more(model: LanguageModel) -> str:
    """What else makes room for a longer prompt."""
    if model.num_blocks * BLOCK_SIZE < model.max_model_len:
        return ", or raise kv_cache_tokens"
    if model.max_model_len < model.context_length:
        return f", or raise max_model_len (-c), at most {model.context_length}"
    return ""


def _checked_params(params: SamplingParams | None) -> SamplingParams:
    if not isinstance(params, SamplingParams | None):
        raise ParameterError("params", "must be a SamplingParams such as SamplingParams(temperature=0)")
    return SamplingParams() if params is None else params


def _as_list(prompts: Prompt | SequenceOf[Prompt]) -> list[Prompt]:
    """Every prompt by itself. Arrays stand for lists; integers of other libraries for Python's."""
    if isinstance(prompts, str | PicturePrompt):
        return [prompts]
    items = _as_items(prompts)
    if all(isinstance(item, Integral) for item in items):
        return [[int(item) for item in items]]
    many: list[Prompt] = [item if isinstance(item, str | PicturePrompt) else _as_items(item) for item in items]
    for prompt in many:
        if not isinstance(prompt, str) and not all(isinstance(item, Integral) for item in prompt):
            raise ParameterError("prompt", "has something other than whole numbers among its token ids")
    as_they_are = str | PicturePrompt
    return [prompt if isinstance(prompt, as_they_are) else [int(token) for token in prompt] for prompt in many]


def _as_items(value: Any) -> list[Any]:
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, bytes | Mapping) or not isinstance(value, Iterable):
        raise ParameterError("prompt", "must be text, token ids, or a list of either")
    return list(value)
