"""The messages that rooms exchange: frozen, small, without behaviour beyond checking themselves."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, Literal, Protocol

from foredraft.errors import ForedraftError, ParameterError

FinishReason = Literal["stop", "length", "abort"]
Array = Any  # an array of the array API standard: numpy on the CPU core, torch in the hf backend

#: The source of tokens that the target itself chose (corrections, bonus tokens, plain decoding).
TARGET = "target"


@dataclass(frozen=True, slots=True)
class StructuredOutputs:
    """What the text has to be: exactly one of these. Raises ParameterError for none or several."""

    json_schema: str | dict[str, Any] | None = None  # kept as its JSON text
    json_object: bool = False  # any JSON object
    regex: str | None = None  # of the whole text
    grammar: str | None = None  # Lark or GBNF
    choice: Sequence[str] = ()  # one of these texts

    def __post_init__(self) -> None:
        name = "structured_outputs"
        if isinstance(self.json_schema, dict):
            object.__setattr__(self, "json_schema", _json(name, self.json_schema))
        for field_name in ("json_schema", "regex", "grammar"):
            value = getattr(self, field_name)
            _check(value is None or isinstance(value, str), name, f"needs text for {field_name}")
        _check(isinstance(self.json_object, bool), name, "needs true or false for json_object")
        _check(not isinstance(self.choice, str), name, "needs a list of texts for choice")
        choice = _items(name, self.choice)
        _check(
            all(isinstance(text, str) and text for text in choice), name, "needs texts that are not empty for choice"
        )
        object.__setattr__(self, "choice", choice)
        given = [self.json_schema is not None, self.json_object, self.regex is not None, self.grammar is not None]
        _check(
            sum([*given, bool(choice)]) == 1,
            name,
            "needs exactly one of json_schema, json_object, regex, grammar and choice",
        )


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens. Processing order: bias, penalties, grammar, temperature, min-p, top-k, top-p.

    `seed` makes the text a function of (model, prompt, parameters, seed) alone: the same with or without speculation.
    Raises ParameterError for values that mean nothing.
    """

    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: off
    min_p: float = 0.0
    seed: int | None = None
    n: int = 1
    max_tokens: int | None = 256  # None: up to the context
    min_tokens: int = 0  # no end-of-text token before so many tokens; a grammar that is complete ends the text earlier
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None  # how many alternatives to report beside the chosen token
    prediction: str | None = None  # text that the answer is expected to resemble: a source for the n-gram drafter
    num_speculative_tokens: int | None = None  # this request's largest draft; 0 switches drafting off
    drafters: Sequence[str] | None = None  # of the engine's, by name, those that may draft; None: all
    structured_outputs: StructuredOutputs | None = None  # what the text has to be

    def __post_init__(self) -> None:
        self._normalise()
        _check(self.temperature >= 0, "temperature", "must be 0 (greedy) or more")
        _check(0 < self.top_p <= 1, "top_p", "must be above 0 and at most 1")
        _check(self.top_k >= -1, "top_k", "must be positive, or 0 for no limit")
        _check(0 <= self.min_p <= 1, "min_p", "must lie between 0 and 1")
        _check(self.seed is None or -(2**63) <= self.seed < 2**64, "seed", "must fit in 64 bits")
        _check(1 <= self.n <= 128, "n", "must lie between 1 and 128")
        _check(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", "must be at least 1")
        _check(self.min_tokens >= 0, "min_tokens", "must be 0 or more")
        _check(
            self.max_tokens is None or self.min_tokens <= self.max_tokens, "min_tokens", "must not exceed max_tokens"
        )
        _check(all(self.stop), "stop", "must not contain an empty string")
        _check(all(0 <= t < 2**31 for t in self.stop_token_ids), "stop_token_ids", "must lie between 0 and 2^31 - 1")
        _check(-2 <= self.presence_penalty <= 2, "presence_penalty", "must lie between -2 and 2")
        _check(-2 <= self.frequency_penalty <= 2, "frequency_penalty", "must lie between -2 and 2")
        _check(
            0.01 <= self.repetition_penalty <= 100, "repetition_penalty", "must lie between 0.01 and 100 (1 means none)"
        )
        _check(all(-100 <= b <= 100 for b in self.logit_bias.values()), "logit_bias", "must lie between -100 and 100")
        _check(self.logprobs is None or 0 <= self.logprobs <= 20, "logprobs", "must lie between 0 and 20")
        _check(
            self.num_speculative_tokens is None or 0 <= self.num_speculative_tokens <= MAX_DRAFT,
            "num_speculative_tokens",
            f"must lie between 0 and {MAX_DRAFT}",
        )

    def _normalise(self) -> None:
        """Python's own types, and none of the caller's lists: they could change later."""
        for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"):
            object.__setattr__(self, name, _number(name, getattr(self, name)))
        for name in ("top_k", "n", "min_tokens"):
            object.__setattr__(self, name, _whole(name, getattr(self, name)))
        for name in ("seed", "max_tokens", "logprobs", "num_speculative_tokens"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _whole(name, getattr(self, name)))
        _check(isinstance(self.ignore_eos, bool), "ignore_eos", "must be true or false")
        stop = (self.stop,) if isinstance(self.stop, str) else _items("stop", self.stop)
        _check(all(isinstance(text, str) for text in stop), "stop", "must be text or a list of texts")
        ids = tuple(_whole("stop_token_ids", t) for t in _items("stop_token_ids", self.stop_token_ids))
        bias = {} if self.logit_bias is None else self.logit_bias
        _check(isinstance(bias, Mapping), "logit_bias", "must map token ids to numbers")
        if self.drafters is not None:
            names = (self.drafters,) if isinstance(self.drafters, str) else _items("drafters", self.drafters)
            _check(all(isinstance(name, str) for name in names), "drafters", "must be a list of names")
            object.__setattr__(self, "drafters", names)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", ids)
        object.__setattr__(
            self, "logit_bias", {_whole("logit_bias", t): _number("logit_bias", b) for t, b in bias.items()}
        )
        _check(self.prediction is None or isinstance(self.prediction, str), "prediction", "must be text")
        wanted = self.structured_outputs
        _check(
            wanted is None or isinstance(wanted, StructuredOutputs),
            "structured_outputs",
            'must be a StructuredOutputs such as StructuredOutputs(regex="yes|no")',
        )

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def is_coupled(self) -> bool:
        """Whether a draft shares the target's own choice (argmax, or the user's seed): it carries no probabilities."""
        return self.is_greedy or self.seed is not None


#: Most tokens in one draft. A pass over more rows than this is bound by arithmetic on every machine we know.
MAX_DRAFT = 64

#: Most threads of one engine.
MAX_THREADS = 256


def _check(condition: bool, name: str, problem: str) -> None:
    if not condition:
        raise ParameterError(name, problem)


def check_whole(name: str, value: Any, low: int, high: int | None = None) -> None:
    """Raises ParameterError for what is no whole number from low to high (None: or more)."""
    is_whole = isinstance(value, Integral) and not isinstance(value, bool)
    limits = f"of at least {low}" if high is None else f"from {low} to {high}"
    _check(is_whole and low <= value and (high is None or value <= high), name, f"must be a whole number {limits}")


def check_choice(name: str, value: Any, choices: Sequence[str]) -> None:
    """Raises ParameterError for what is none of the choices."""
    _check(value in choices, name, f"must be one of {', '.join(choices)}")


def _whole(name: str, value: Any) -> int:
    is_whole = isinstance(value, Integral) and not isinstance(value, bool)
    _check(is_whole, name, f"needs whole numbers, not {value!r}")
    return int(value)


def _number(name: str, value: Any) -> float:
    try:
        number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    except OverflowError:  # an integer of hundreds of digits
        number = math.inf
    _check(math.isfinite(number), name, f"needs a finite number, not {str(value)[:40]}")
    return number


def _json(name: str, value: dict[str, Any]) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        raise ParameterError(name, "has a json_schema that JSON cannot hold") from None


def _items(name: str, value: Any) -> tuple[Any, ...]:
    """None stands for no items."""
    _check(value is None or isinstance(value, Iterable), name, "must be a list")
    return () if value is None else tuple(value)


class TokenGrammar(Protocol):
    """What a request's grammar allows after the committed text and a path of draft tokens, each allowed where it is.

    Both raise GrammarError where the grammar cannot go on.
    """

    def mask(self, path: Sequence[int], /) -> Any:
        """Bit i % 32 of word i // 32: whether token i may come next. uint32 [(vocab + 31) // 32] of numpy."""
        ...

    def is_complete(self, path: Sequence[int], /) -> bool:
        """Whether nothing may follow: the text ends here."""
        ...


class SequenceView(Protocol):
    """What a drafter may see of a sequence: its tokens so far, never the target's logits."""

    @property
    def id(self) -> int: ...
    @property
    def tokens(self) -> Sequence[int]:
        """Prompt and output, the newest last. Grows only; a drafter may keep an index into it."""
        ...

    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def pictures(self) -> Sequence[Picture]:
        """Of the prompt."""
        ...

    @property
    def params(self) -> SamplingParams: ...
    @property
    def prediction(self) -> Sequence[int]:
        """Token ids of `params.prediction`, or empty."""
        ...

    @property
    def cache_salt(self) -> str:
        """A drafter's caches, too, are shared only among sequences of one salt."""
        ...

    @property
    def sampler(self) -> Any:
        """The sequence's own sampler (`algo/sampler.py`), for drafters that draw from the processed law."""
        ...

    @property
    def grammar(self) -> TokenGrammar | None:
        """What the text has to be, for drafters that draw; others' tokens are cut where they break it."""
        ...


@dataclass(frozen=True, eq=False)
class Picture:
    """An image in a prompt: the tokens `start .. end - 1` stand for it. An object is one image of one prompt.

    key: of equal ones the model sees the same, so that texts share cached blocks only where keys are equal, too.
    inputs: what the model reads in their place, as its own backend wrote it; nobody else looks into it.
    """

    start: int
    num_tokens: int
    key: bytes
    inputs: Any

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


@dataclass(frozen=True, eq=False)
class PicturePrompt(Sequence[int]):
    """Token ids of a prompt, some of which stand for pictures, in the order of the prompt."""

    token_ids: Sequence[int]
    pictures: Sequence[Picture]

    def __len__(self) -> int:
        return len(self.token_ids)

    def __getitem__(self, index: Any) -> Any:
        return self.token_ids[index]

    def __iter__(self) -> Iterator[int]:
        return iter(self.token_ids)


def pictures_of(prompt: Sequence[int]) -> Sequence[Picture]:
    return prompt.pictures if isinstance(prompt, PicturePrompt) else ()


@dataclass(frozen=True, slots=True)
class PassPrice:
    """What the next pass costs and brings. One for all requests of a proposal: their drafts are verified together.

    pass_s [m + 1]: seconds of the pass with m draft tokens of theirs, but for `DraftRequest.row_s`; at least as many as
    they ask for in all. tokens: what it is expected to bring without any.
    """

    pass_s: Sequence[float]
    tokens: float = 1.0


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """Ask for at most `num_tokens` tokens after the last token of `seq`.

    None at all are asked for while a prompt is being computed: the drafter may keep up with it. price: for drafters
    that stop where going on does not pay; None: fill the draft. row_s: seconds that the context of this sequence adds
    to the pass for each draft token. num_slots: a tree has no more nodes; 0: only chains are taken. is_trial: the
    drafter was off and is tried again; a rough draft will do if a good one costs much.
    """

    seq: SequenceView
    num_tokens: int
    price: PassPrice | None = None
    row_s: float = 0.0
    num_slots: int = MAX_DRAFT
    is_trial: bool = False


@dataclass(frozen=True, slots=True)
class Draft:
    """Proposed tokens, a chain or a tree.

    tokens [n]; parents [n] with parents[i] < i and -1 for children of the last known token (None: a chain);
    probs [n, vocab]: the law that each token was drawn from, exactly as drawn (None: no randomness but the target's own
    noise was used, so a token counts as certain); confidences [n]: the drafter's own estimate that a token is accepted
    once its parents are (None: it has none); source: where the tokens come from, as users see it: the drafter's name,
    or a word for one of its sources.
    """

    tokens: Sequence[int] = ()
    parents: Sequence[int] | None = None
    probs: Array | None = None
    confidences: Sequence[float] | None = None
    source: str = ""


NO_DRAFT = Draft()


@dataclass(frozen=True, slots=True)
class Verdict:
    """What verification made of a draft: the accepted nodes in path order, and the token that follows them."""

    accepted: Sequence[int]  # indices into draft.tokens, root first
    token: int  # correction or bonus, drawn from the target


@dataclass(frozen=True, slots=True)
class Usage:
    """num_cached_tokens: of the prompt, those that the prefix cache held already when the answer was begun."""

    prompt_tokens: int
    completion_tokens: int
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class SpeculationStats:
    """One request's speculation. A draft is one proposal of at least one token; the bonus token is not accepted.

    mean_acceptance_length = 1 + num_accepted_tokens / num_drafts; accepted_per_position[i]: drafts whose token at depth
    i was accepted, as far as the longest draft went; tokens_per_pass counts every pass after the prompt's.
    """

    num_passes: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    acceptance_rate: float
    mean_acceptance_length: float
    tokens_per_pass: float
    accepted_per_position: Sequence[int]
    by_drafter: Mapping[str, Mapping[str, int]]  # name -> {drafts, draft_tokens, accepted_tokens}


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds. `prefill_s` ends with the first token; `tokens_per_s` = (completion_tokens - 1) / decode_s."""

    load_s: float
    prefill_s: float
    decode_s: float
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural logarithms, of the raw logits."""

    token_id: int
    logprob: float
    top: Sequence[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished answer. `token_ids` includes the end-of-text token or the one that completed a stop string.

    `text` includes neither.
    """

    index: int
    text: str
    token_ids: Sequence[int]
    finish_reason: FinishReason
    usage: Usage
    origins: Sequence[str]  # a source per token
    speculation: SpeculationStats
    timing: Timing
    logprobs: Sequence[TokenLogprob] | None = None


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one step added to one answer. The texts of an answer's chunks concatenate to its `Completion.text`."""

    request_id: int  # from 1 on, in the order of the prompts
    index: int  # which of the n choices
    text: str
    token_ids: Sequence[int]
    origins: Sequence[str]
    num_draft_tokens: int = 0  # how many were verified to get them
    finish_reason: FinishReason | None = None
    completion: Completion | None = None  # with the last chunk
    error: ForedraftError | None = None  # why the answer was aborted, if it could not go on
    logprobs: Sequence[TokenLogprob] | None = None  # of its tokens, where they were asked for
