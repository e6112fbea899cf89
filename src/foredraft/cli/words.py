"""How tokens and figures are put into words for people."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Protocol

from foredraft.types import Completion


class TokenBytes(Protocol):
    """The part of a tokenizer that is needed to show tokens."""

    def token_bytes(self, id: int) -> bytes: ...


def token_texts(tokenizer: TokenBytes, ids: Iterable[int]) -> list[str]:
    """What each token adds to the text. A character made of several tokens belongs to the last of them."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    return [decoder.decode(tokenizer.token_bytes(id)) for id in ids]


def summarise(completion: Completion) -> str:
    """One line: length, speed (there is none for what a single pass said), and what speculation did."""
    spec, timing, num_tokens = completion.speculation, completion.timing, completion.usage.completion_tokens
    words = "1 token" if num_tokens == 1 else f"{num_tokens} tokens"
    if timing.tokens_per_s:
        words += f", {timing.tokens_per_s:.1f} tokens/s"
    if spec.num_drafts:
        words += f"; {spec.tokens_per_pass:.2f} tokens a pass, {describe_acceptance(completion)}"
    return f"[{words}; first token after {timing.prefill_s:.2f} s, loaded in {timing.load_s:.2f} s]"


def describe_acceptance(completion: Completion) -> str:
    spec = completion.speculation
    if not spec.num_drafts:
        return "no drafts"
    return f"{spec.num_accepted_tokens} of {spec.num_draft_tokens} drafted tokens accepted ({spec.acceptance_rate:.0%})"
