"""Text across tokenizers: where the tokens of two of them meet, and what both have in common.

Everything is bytes: a token is what it adds to the text, so byte-level and SentencePiece vocabularies meet in the
same place, in the middle of a character too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from foredraft.types import Array

Encode = Callable[[bytes], list[int]]  # ids whose bytes are exactly these; raises ValueError where there are none
TokenBytes = Callable[[int], bytes]

#: What a word may begin with: tokenizers cut text before it.
_BLANKS = b" \n\t\r"


def encode_after(encode: Encode, token_bytes: TokenBytes, before: bytes, text: bytes) -> list[int]:
    """Ids of `text` as it stands behind `before`, a little of what precedes it (universal assisted generation).

    What precedes decides how words are cut. Where a token would reach across the join, the text is taken by itself: the
    tokens before it are there already and cannot change. Raises ValueError where the vocabulary cannot spell it.
    """
    ids = encode(before + text)
    first = first_after(ids, token_bytes, len(text))
    return encode(text) if first is None else ids[first:]


def first_after(ids: Sequence[int], token_bytes: TokenBytes, num_bytes: int) -> int | None:
    """Index of the first of the tokens that spell exactly the last `num_bytes` bytes; None if one reaches across."""
    left = num_bytes
    first = len(ids)
    while left > 0 and first > 0:
        first -= 1
        left -= len(token_bytes(ids[first]))
    return first if left == 0 else None


def num_settled(ids: Sequence[int], token_bytes: TokenBytes, num_unsettled: int, max_unsettled: int) -> int:
    """How many tokens of a text that grows will stay as they are, whatever follows.

    Up to the last word that begins at least `num_unsettled` tokens before the end: no tokenizer looks farther back. In
    writing without blanks all but `num_unsettled`, once there are `max_unsettled`.
    """
    last = len(ids) - num_unsettled
    for i in range(last, 0, -1):
        begin, before = token_bytes(ids[i])[:1], token_bytes(ids[i - 1])[-1:]
        if begin in _BLANKS and before not in _BLANKS:
            return i
    return last if len(ids) > max_unsettled else 0


def whole_characters(text: bytes) -> int:
    """Bytes of `text` before a UTF-8 character at its end that is not complete yet."""
    for length in range(1, min(3, len(text)) + 1):
        byte = text[-length]
        if byte >= 0xC0:  # it begins a character of 2, 3 or 4 bytes
            needed = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(text) - length if needed > length else len(text)
        if byte < 0x80:
            break
    return len(text)


def spread(probabilities: Sequence[float], lengths: Sequence[int], token_lengths: Sequence[int]) -> list[float]:
    """Chances of tokens that another tokenizer drew: of each the product of those that were drawn within it.

    probabilities, lengths [drawn]: of each drawn token, and its bytes; token_lengths [tokens]: bytes of the tokens that
    spell the same text. A drawn token counts where it begins: what it says beyond is certain by then.
    """
    chances = [1.0] * len(token_lengths)
    ends = np.cumsum(token_lengths)
    begin = 0
    for probability, length in zip(probabilities, lengths, strict=True):
        token = int(np.searchsorted(ends, begin, side="right"))
        if token < len(chances):
            chances[token] *= probability
        begin += length
    return chances


@dataclass(frozen=True, slots=True)
class SharedVocabulary:
    """Tokens of equal bytes in two vocabularies (token-level intersection, Timor et al., ICML 2025, arXiv 2502.05202).

    target_ids, draft_ids [n]: one of each for every shared text. Further ids of the draft with the same bytes,
    more_draft_ids [m], stand for more_target_ids [m]: their probabilities add.
    """

    target_ids: NDArray[np.int64]
    draft_ids: NDArray[np.int64]
    more_target_ids: NDArray[np.int64]
    more_draft_ids: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.target_ids)


def share_vocabularies(
    target: Mapping[bytes, Sequence[int]], draft: Mapping[bytes, Sequence[int]], target_size: int, draft_size: int
) -> SharedVocabulary:
    """target, draft: ids of each text, the one that the tokenizer itself writes first. Sizes: widths of the logits."""
    both = [(target[text][0], ids) for text, ids in draft.items() if text in target]
    pairs = [(t, d) for t, ids in both for d in ids[:1] if t < target_size and d < draft_size]
    more = [(t, d) for t, ids in both for d in ids[1:] if t < target_size and d < draft_size and ids[0] < draft_size]
    target_ids, draft_ids = np.array(sorted(pairs), np.int64).reshape(-1, 2).T
    more_target_ids, more_draft_ids = np.array(more, np.int64).reshape(-1, 2).T
    return SharedVocabulary(target_ids, draft_ids, more_target_ids, more_draft_ids)


def to_target(logits: Array, shared: SharedVocabulary, out: NDArray[np.float32]) -> None:
    """Write a draft's row [draft vocab] as one of the target's, `out` [target vocab]: -inf for what is not shared.

    Its softmax is the draft's law restricted to the shared tokens and renormalised. `out` is -inf to begin with, or a
    row of the same `shared`.
    """
    row = np.asarray(logits, np.float32)
    out[shared.target_ids] = row[shared.draft_ids]
    np.logaddexp.at(out, shared.more_target_ids, row[shared.more_draft_ids])
