"""What a grammar allows along a draft, as bit masks: bit i % 32 of word i // 32 says whether token i may come.

A draft and its masks, for a grammar of "yes" or "no" over the letters:

    draft    y ── e ── s        masks of the rows    after the text  {y, n}
              └── a                                  after y         {e}        a is not allowed
                                                     after y e       {s}
                                                     after y e s     anything   the text is complete here
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import numpy as np
from numpy.typing import NDArray

from foredraft.algo.tree import chain, path_to
from foredraft.types import Draft, TokenGrammar


def pack_mask(allowed: NDArray[np.bool_]) -> NDArray[np.uint32]:
    """allowed [vocab] as words [(vocab + 31) // 32]."""
    padded = np.zeros(-(-len(allowed) // 32) * 32, dtype=np.bool_)
    padded[: len(allowed)] = allowed
    return np.packbits(padded, bitorder="little").view("<u4").astype(np.uint32)


def unpack_mask(words: NDArray[np.uint32], vocab_size: int) -> NDArray[np.bool_]:
    """[vocab] of words [(vocab + 31) // 32]."""
    octets = words.astype("<u4").view(np.uint8)
    return np.unpackbits(octets, count=vocab_size, bitorder="little").astype(np.bool_)


def is_allowed(mask: NDArray[np.uint32], token: int) -> bool:
    return token // 32 < len(mask) and bool(mask[token // 32] >> np.uint32(token % 32) & np.uint32(1))


def cut_draft(draft: Draft, grammar: TokenGrammar) -> Draft:
    """The draft without what cannot become text: tokens that are not allowed, and all behind them or behind the end.

    A token that was drawn from probabilities stays even if it is not allowed: the target, whose law gives it nothing,
    rejects it. To drop it because of what it is would bend the law of the tokens that are left.
    """
    parents = _parents(draft)
    kept: list[int] = []
    places: dict[int, int] = {-1: -1}  # node that others may hang on -> its place among the kept
    for node, (token, parent) in enumerate(zip(draft.tokens, parents, strict=True)):
        if parent not in places:
            continue
        path = _tokens_to(draft, parents, parent)
        allowed = is_allowed(grammar.mask(path), token)
        if allowed and not grammar.is_complete([*path, token]):
            places[node] = len(kept)
        if allowed or draft.probs is not None:
            kept.append(node)
    if len(kept) == len(draft.tokens):
        return draft
    is_prefix = kept == list(range(len(kept)))
    return replace(
        draft,
        tokens=[draft.tokens[i] for i in kept],
        parents=None if draft.parents is None else [places[parents[i]] for i in kept],
        probs=None if draft.probs is None else draft.probs[: len(kept)] if is_prefix else draft.probs[kept],
        confidences=None if draft.confidences is None else [draft.confidences[i] for i in kept],
    )


def masks_along(draft: Draft, grammar: TokenGrammar) -> NDArray[np.uint32]:
    """Masks [1 + n, words] of the rows of a draft that `cut_draft` has left.

    After a token that is not allowed, or that completes the text, anything may come: no row behind it is used.
    """
    parents = _parents(draft)
    root = cast(NDArray[np.uint32], grammar.mask(()))
    masks = np.full((1 + len(parents), len(root)), 0xFFFFFFFF, dtype=np.uint32)
    masks[0] = root
    for node, (token, parent) in enumerate(zip(draft.tokens, parents, strict=True)):
        path = _tokens_to(draft, parents, node)
        if is_allowed(masks[1 + parent], token) and not grammar.is_complete(path):
            masks[1 + node] = grammar.mask(path)
    return masks


def _parents(draft: Draft) -> Sequence[int]:
    return chain(len(draft.tokens)) if draft.parents is None else draft.parents


def _tokens_to(draft: Draft, parents: Sequence[int], node: int) -> list[int]:
    return [draft.tokens[i] for i in path_to(parents, node)]
