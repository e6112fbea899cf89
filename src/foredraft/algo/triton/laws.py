"""Rows of logits to laws, and samples of them, in Triton; `algo/filters.py` is the reference.

    logits    [rows, vocab]   float32, after bias, penalties and grammar; strides of rows are free
    best      [rows, blocks]  the greatest logit of each block of the vocabulary, and in `place` its token
    weights   [rows, vocab]   float64 in proportion to the law, 1 for the likeliest token, 0 for those excluded
    sums      [rows, blocks]  of the weights

A program sees one row, or one block of one row, and sums in an order of its own: no row's bits depend on the others. A
NaN anywhere in a row makes its `best` infinite, which that of no sound row is; only rows that a rule asks for matter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from foredraft.algo.triton.noise import EXACT, Keys, exponential, philox

#: Most tokens in a block: what one program reads at once.
MAX_BLOCK = 2048
#: Fewest: 16 tokens of each word of the noise.
MIN_BLOCK = 64


class Filters(NamedTuple):
    """Of each row: float64 [rows], top_k int64. 0 is greedy, and no limit for the others but top_p, where 1 is none."""

    temperature: torch.Tensor
    min_p: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor


@dataclass(frozen=True, slots=True)
class Best:
    """The greatest value of each block, and the lowest token that has it: float64, int32 [rows, blocks]."""

    value: torch.Tensor
    token: torch.Tensor


@dataclass(frozen=True, slots=True)
class Laws:
    """Laws by row, as the head of this file has them."""

    weights: torch.Tensor
    sums: torch.Tensor
    best: Best


def find_best(logits: torch.Tensor) -> Best:
    """The argmax in its parts: all that greedy rows need."""
    rows, vocab = logits.shape
    best = _empty_best(rows, vocab, logits.device)
    _find_best[rows, best.value.shape[1]](
        logits, best.value, best.token, vocab, logits.stride(0), BLOCK=block_size(vocab), **EXACT
    )
    return best


def make_laws(logits: torch.Tensor, best: Best, filters: Filters, *, cuts_k: bool, cuts_p: bool) -> Laws:
    """Temperature, min-p, top-k, top-p. cuts_k, cuts_p: whether any row has the filter. Greedy rows are one-hot."""
    rows, vocab = logits.shape
    blocks = best.value.shape[1]
    weights = torch.empty((rows, vocab), dtype=torch.float64, device=logits.device)
    sums = torch.empty((rows, blocks), dtype=torch.float64, device=logits.device)
    _weigh[rows, blocks](
        logits, best.value, best.token, filters, weights, sums, vocab, logits.stride(0),
        BLOCK=block_size(vocab), NUM_BLOCKS=power_of_2(blocks), **EXACT,
    )  # fmt: skip
    for is_wanted, by_mass in ((cuts_k, False), (cuts_p, True)):
        if is_wanted:
            _keep_likeliest[rows,](
                logits, filters, weights, sums, vocab, logits.stride(0), blocks,
                BY_MASS=by_mass, BLOCK=block_size(vocab), NUM_BLOCKS=power_of_2(blocks), **EXACT,
            )  # fmt: skip
    return Laws(weights, sums, best)


def race(laws: Laws, filters: Filters, keys: Keys) -> Best:
    """Who wins each block: the token with the greatest log p + Gumbel noise, that is weight / exponential noise.

    Rows that are greedy, broken or empty keep their best logits.
    """
    rows, vocab = laws.weights.shape
    winners = _empty_best(rows, vocab, laws.weights.device)
    _race[rows, winners.value.shape[1]](
        laws.weights, laws.best.value, laws.best.token, filters, keys, winners.value, winners.token, vocab,
        BLOCK=block_size(vocab), NUM_BLOCKS=power_of_2(winners.value.shape[1]), **EXACT,
    )  # fmt: skip
    return winners


def _empty_best(rows: int, vocab: int, device: torch.device) -> Best:
    shape = (rows, triton.cdiv(vocab, block_size(vocab)))
    value = torch.empty(shape, dtype=torch.float64, device=device)
    return Best(value, torch.empty(shape, dtype=torch.int32, device=device))


def block_size(vocab: int) -> int:
    return min(MAX_BLOCK, max(MIN_BLOCK, power_of_2(vocab)))


def power_of_2(n: int) -> int:
    return max(2, 1 << (n - 1).bit_length())


@triton.jit
def best_of_row(value, token, row, num_blocks, NUM_BLOCKS: tl.constexpr):
    """The greatest value of a row and its token, the lowest of equals."""
    blocks = tl.arange(0, NUM_BLOCKS)
    values = tl.load(value + row * num_blocks + blocks, mask=blocks < num_blocks, other=float("-inf"))
    return tl.max(values, 0), tl.load(token + row * num_blocks + tl.argmax(values, 0))


@triton.jit
def is_finite(best):
    return (best < float("inf")) & (best > float("-inf"))


@triton.jit
def _find_best(logits, value, token, vocab, stride, BLOCK: tl.constexpr):
    row, block = tl.program_id(0), tl.program_id(1)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row.to(tl.int64) * stride + ids, mask=ids < vocab, other=float("-inf"))
    x = tl.where(x == x, x, float("inf"))  # a NaN
    at = row * tl.num_programs(1) + block
    tl.store(value + at, tl.max(x, 0).to(tl.float64))
    tl.store(token + at, block * BLOCK + tl.argmax(x, 0))


@triton.jit
def _weigh(logits, value, token, filters, weights, sums, vocab, stride, BLOCK: tl.constexpr, NUM_BLOCKS: tl.constexpr):
    row, block = tl.program_id(0), tl.program_id(1)
    num_blocks = tl.num_programs(1)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    inside = ids < vocab
    best, winner = best_of_row(value, token, row, num_blocks, NUM_BLOCKS)
    temperature = tl.load(filters.temperature + row)
    if temperature > 0 and is_finite(best):
        x = tl.load(logits + row.to(tl.int64) * stride + ids, mask=inside, other=float("-inf")).to(tl.float64)
        weight = tl.exp((x - best) / temperature)
        weight = tl.where(weight >= tl.load(filters.min_p + row), weight, 0.0)
    else:
        weight = (ids == winner).to(tl.float64)
    tl.store(weights + row.to(tl.int64) * vocab + ids, weight, mask=inside)
    tl.store(sums + row * num_blocks + block, tl.sum(weight, 0))


@triton.jit
def _keep_likeliest(
    logits, filters, weights, sums, vocab, stride, num_blocks,
    BY_MASS: tl.constexpr, BLOCK: tl.constexpr, NUM_BLOCKS: tl.constexpr,
):  # fmt: skip
    """Of a row, keep the fewest likeliest tokens that number top_k, or have top_p of the mass.

    The last logit kept is found bit by bit: at each, does what is above still reach the goal? Among tokens that have
    this logit the lowest ids stay.
    """
    row = tl.program_id(0)
    logits += row.to(tl.int64) * stride
    weights += row.to(tl.int64) * vocab
    sums += row * num_blocks
    if BY_MASS:
        top_p = tl.load(filters.top_p + row)
        blocks = tl.arange(0, NUM_BLOCKS)
        goal = top_p * tl.sum(tl.load(sums + blocks, mask=blocks < num_blocks, other=0.0), 0)
        if top_p >= 1:
            return
    else:
        top_k = tl.load(filters.top_k + row)
        goal = top_k.to(tl.float64)
        if (top_k <= 0) | (top_k >= vocab):
            return

    lowest = tl.full([], -(2**31), tl.int64)
    step = tl.full([], 2**31, tl.int64)
    for _ in range(32):
        reaches = _measure(logits, weights, lowest + step, vocab, BY_MASS, BLOCK) >= goal
        lowest = tl.where(reaches, lowest + step, lowest)
        step = step // 2

    above = _measure(logits, weights, lowest + 1, vocab, BY_MASS, BLOCK)
    num_equal = tl.full([], 0, tl.int32)
    for start in range(0, vocab, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        key, weight, size = _load_sized(logits, weights, ids, vocab, BY_MASS)
        is_equal = ((key == lowest) & (weight > 0)).to(tl.int32)
        before = above + (num_equal + tl.cumsum(is_equal, 0) - is_equal).to(tl.float64) * size
        kept = tl.where((key > lowest) | ((is_equal > 0) & (before < goal)), weight, 0.0)
        num_equal += tl.sum(is_equal, 0)
        tl.store(weights + ids, kept, mask=ids < vocab)
        tl.store(sums + start // BLOCK, tl.sum(kept, 0))


@triton.jit
def _measure(logits, weights, lowest, vocab, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Number or mass of the tokens whose logit's key is at least `lowest`."""
    total = tl.zeros([BLOCK], tl.float64)
    for start in range(0, vocab, BLOCK):
        key, _, size = _load_sized(logits, weights, start + tl.arange(0, BLOCK), vocab, BY_MASS)
        total += tl.where(key >= lowest, size, 0.0)
    return tl.sum(total, 0)


@triton.jit
def _load_sized(logits, weights, ids, vocab, BY_MASS: tl.constexpr):
    """Tokens' keys, integers in the order of their logits; their weights; and what they count for."""
    x = tl.load(logits + ids, mask=ids < vocab, other=float("-inf"))
    bits = x.to(tl.int32, bitcast=True).to(tl.int64)
    key = tl.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
    weight = tl.load(weights + ids, mask=ids < vocab, other=0.0)
    size = weight if BY_MASS else (weight > 0).to(tl.float64)
    return key, weight, size


@triton.jit
def _race(
    weights, best_value, best_token, filters, keys, value, token, vocab, BLOCK: tl.constexpr, NUM_BLOCKS: tl.constexpr
):
    row, block = tl.program_id(0), tl.program_id(1)
    num_blocks = tl.num_programs(1)
    at = row * num_blocks + block
    best, _ = best_of_row(best_value, best_token, row, num_blocks, NUM_BLOCKS)
    if tl.load(filters.temperature + row) > 0 and is_finite(best):
        # 16 neighbouring tokens take one word each of 16 counters, the next 16 the second word, and so on.
        index = block * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
        word0, word1, word2, word3 = philox(keys, row, index, None)
        id0 = index // 16 * 64 + index % 16
        weights += row.to(tl.int64) * vocab
        speed0 = _speed(weights, id0, word0, vocab)
        speed1 = _speed(weights, id0 + 16, word1, vocab)
        speed2 = _speed(weights, id0 + 32, word2, vocab)
        speed3 = _speed(weights, id0 + 48, word3, vocab)
        fastest = tl.max(tl.maximum(tl.maximum(speed0, speed1), tl.maximum(speed2, speed3)), 0)
        first = tl.where(speed3 == fastest, id0 + 48, 2**31 - 1)
        first = tl.where(speed2 == fastest, id0 + 32, first)
        first = tl.where(speed1 == fastest, id0 + 16, first)
        first = tl.where(speed0 == fastest, id0, first)
        tl.store(value + at, fastest)
        tl.store(token + at, tl.min(first, 0))
    else:
        tl.store(value + at, tl.load(best_value + at))
        tl.store(token + at, tl.load(best_token + at))


@triton.jit
def _speed(weights, ids, words, vocab):
    return tl.load(weights + ids, mask=ids < vocab, other=0.0) / exponential(words)
