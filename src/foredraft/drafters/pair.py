"""Whether a model can draft for another, and how: what `check-pair` says, and what is said at start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from foredraft.models.base import LanguageModel, TextTokenizer
from foredraft.models.spelling import Speller
from foredraft.models.tokenizer import same_tokenizer

PairKind = Literal["native", "cross-vocabulary", "impossible"]


@dataclass(frozen=True, slots=True)
class Pair:
    """reason: one sentence without its full stop. share: of the draft's texts, how many are tokens of the target."""

    target: str
    draft: str
    kind: PairKind
    reason: str
    share: float

    def __str__(self) -> str:
        how = {
            "native": f"{self.draft} drafts for {self.target} natively",
            "cross-vocabulary": f"{self.draft} drafts for {self.target} across vocabularies",
            "impossible": f"{self.draft} cannot draft for {self.target}",
        }
        return f"{how[self.kind]}: {self.reason}"


def compare_tokenizers(
    target: str, target_tokenizer: TextTokenizer, draft: str, draft_tokenizer: TextTokenizer
) -> Pair:
    """By the bytes of their tokens alone: chat templates, padding and other settings are no difference."""
    difference = same_tokenizer(target_tokenizer, draft_tokenizer)
    if difference is None:
        return Pair(target, draft, "native", "every token that both can emit has the same bytes", 1.0)
    ours, theirs = Speller(target_tokenizer).ids, Speller(draft_tokenizer).ids
    if not ours or not theirs:
        whose = "target" if not ours else "draft"
        return Pair(target, draft, "impossible", f"the vocabulary of the {whose} has no text in it", 0.0)
    share = len(ours.keys() & theirs.keys()) / len(theirs)
    reason = f"their tokenizers differ ({difference}); {share:.0%} of the draft's tokens are tokens of the target too"
    return Pair(target, draft, "cross-vocabulary", reason, share)


def warn_of_size(target: LanguageModel, draft: LanguageModel) -> str | None:
    """What to say of a draft that costs as much as its target."""
    if draft.weight_bytes < target.weight_bytes:
        return None
    ours, theirs = (f"{model.weight_bytes / 1e6:.0f} MB of {model.name}" for model in (target, draft))
    return (
        f"the draft is no smaller than its target (a pass reads {theirs}, against {ours}): "
        "the output stays the same, but drafting will hardly pay; choose a smaller draft, or ngram"
    )
