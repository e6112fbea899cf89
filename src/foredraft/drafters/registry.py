"""Drafters by name: `none`, `ngram`, `model:NAME`, and `a+b` for several at once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal

from foredraft.drafters.base import Drafter
from foredraft.drafters.cross_vocab import CrossVocab, CrossVocabDrafter
from foredraft.drafters.model import ModelDrafter
from foredraft.drafters.ngram import NgramDrafter
from foredraft.drafters.pair import compare_tokenizers, warn_of_size
from foredraft.errors import ParameterError, TokenizerMismatchError
from foredraft.models.base import LanguageModel, TextTokenizer

logger = logging.getLogger("foredraft")


@dataclass(frozen=True, slots=True)
class DraftContext:
    """What a drafter may be built from."""

    target: LanguageModel
    tokenizer: TextTokenizer
    read_tokenizer: Callable[[str], TextTokenizer]  # of a model by name, path or hub id
    load_draft: Callable[[str], LanguageModel]
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None
    head_size: int | None = None  # a draft model's output head, in tokens
    cross_vocab: CrossVocab | Literal["off"] = "auto"  # how a draft model of another tokenizer drafts
    enable_prefix_caching: bool = True
    native: bool = True  # the C++ core is there
    sees_alike: Callable[[str, LanguageModel, TextTokenizer], bool] = lambda name, draft, tokenizer: False


@dataclass(frozen=True, slots=True)
class DrafterKind:
    """An entry of the registry. `rank` orders by the cost of a proposal; `takes` names the argument after the colon."""

    make: Callable[[str, DraftContext], Drafter]
    rank: int
    takes: str | None = None


def make_drafters(spec: str, context: DraftContext) -> list[Drafter]:
    """Drafters of a specification like `ngram+model:NAME`, cheapest first; `none` is the empty list.

    Raises ParameterError for an unknown name, a missing or surplus argument, or a drafter named twice.
    """
    if spec == "none":
        return []
    parts = [part.partition(":") for part in spec.split("+")]
    if len(parts) > 1 and any(name == "none" for name, _, _ in parts):
        raise ParameterError("drafter", f"{spec!r}: 'none' cannot be joined with others")
    for name, colon, argument in parts:
        kind = DRAFTERS.get(name)
        if kind is None:
            known = ["none", *DRAFTERS]
            close = get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"
            raise ParameterError("drafter", f"{name!r} is unknown; {hint}")
        if kind.takes is not None and not argument:
            raise ParameterError("drafter", f"{name!r} needs its {kind.takes}: {name}:{kind.takes.upper()}")
        if kind.takes is None and colon:
            raise ParameterError("drafter", f"{name!r} takes no argument, so not {argument!r}")
    if len({part[0] for part in parts}) < len(parts):
        raise ParameterError("drafter", f"{spec!r} names a drafter twice")
    ordered = sorted(parts, key=lambda part: DRAFTERS[part[0]].rank)
    return [DRAFTERS[name].make(argument, context) for name, _, argument in ordered]


def _make_ngram(_: str, context: DraftContext) -> Drafter:
    defaults = NgramDrafter.DEFAULT_MIN_MATCH, NgramDrafter.DEFAULT_MAX_MATCH
    return NgramDrafter(
        min_match=context.prompt_lookup_min or defaults[0], max_match=context.prompt_lookup_max or defaults[1]
    )


def _make_model(name: str, context: DraftContext) -> Drafter:
    tokenizer = context.read_tokenizer(name)
    pair = compare_tokenizers(context.target.name, context.tokenizer, name, tokenizer)
    if pair.kind == "impossible":
        raise TokenizerMismatchError(f"{pair}; choose another draft, or ngram")
    if pair.kind == "cross-vocabulary" and context.cross_vocab == "off":
        raise TokenizerMismatchError(
            f"{name} cannot draft for {context.target.name}, since cross_vocab is off: {pair.reason}; "
            "choose a draft of the same model family, or ngram"
        )
    model = context.load_draft(name)
    if pair.kind == "cross-vocabulary":
        logger.warning(pair)
    if (warning := warn_of_size(context.target, model)) is not None:
        logger.warning(warning)
    if pair.kind == "cross-vocabulary" and context.cross_vocab != "off":
        return CrossVocabDrafter(
            "model",
            model,
            tokenizer,
            context.target,
            context.tokenizer,
            mode=context.cross_vocab,
            enable_prefix_caching=context.enable_prefix_caching,
            native=context.native,
        )
    head_size = context.head_size if context.head_size and context.head_size < model.vocab_size else None
    return ModelDrafter(
        "model",
        model,
        context.target.vocab_size,
        head_size=head_size,
        enable_prefix_caching=context.enable_prefix_caching,
        sees=context.sees_alike(name, model, tokenizer),
    )


DRAFTERS: Mapping[str, DrafterKind] = {
    "ngram": DrafterKind(_make_ngram, rank=0),
    "model": DrafterKind(_make_model, rank=10, takes="name"),
}
