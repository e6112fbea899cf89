"""Which draft tokens to keep and the token that follows them, in Triton; `algo/verify.py` is the reference.

A program decides for one sequence, whose rows begin at `first_row`: row i of them follows draft token i - 1. What is
said of draft token i stands at row i; the row behind the draft has none, its q is 0, and so its bonus token is drawn
from [p - q]+ as a correction is.

    verdicts  [sequences, 3 + most tokens]  int32: fault, token, number accepted, their nodes
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from foredraft.algo.triton.laws import Best, Laws, best_of_row, block_size, power_of_2
from foredraft.algo.triton.noise import EXACT


class Fault(IntEnum):
    """Of a row that a rule had to look at, or of the draft."""

    NONE = 0
    NOT_FINITE = 1
    NO_TOKEN = 2
    NO_DRAFT_LAW = 3


_SOUND = tl.constexpr(int(Fault.NONE))
_NOT_FINITE = tl.constexpr(int(Fault.NOT_FINITE))
_NO_TOKEN = tl.constexpr(int(Fault.NO_TOKEN))
_NO_DRAFT_LAW = tl.constexpr(int(Fault.NO_DRAFT_LAW))
_FIELDS = tl.constexpr(3)  # of a verdict, before its nodes


@dataclass(frozen=True, slots=True)
class Drafts:
    """Drafts of several sequences: int64. first_row, num_tokens [sequences]; token, parent [rows]."""

    first_row: torch.Tensor
    num_tokens: torch.Tensor
    token: torch.Tensor
    parent: torch.Tensor
    most_tokens: int  # of one of them


class _Tests(NamedTuple):
    """Of each row, float64 [rows]: probabilities of its token, what makes weights sum to 1, and what scales p."""

    p: torch.Tensor
    q: torch.Tensor
    p_scale: torch.Tensor
    q_scale: torch.Tensor
    rho: torch.Tensor


def walk(winners: Best, drafts: Drafts) -> torch.Tensor:
    """`sample_and_walk` from the sample of every row. Returns verdicts."""
    sequences, blocks = len(drafts.first_row), winners.value.shape[1]
    nodes = power_of_2(drafts.most_tokens)
    verdicts = torch.empty((sequences, 3 + nodes), dtype=torch.int32, device=winners.value.device)
    _walk[sequences,](
        winners.value, winners.token, drafts.first_row, drafts.num_tokens, drafts.token, drafts.parent, verdicts,
        blocks, NUM_BLOCKS=power_of_2(blocks), NODES=nodes, **EXACT,
    )  # fmt: skip
    return verdicts


def judge_chains(
    laws: Laws, probs: torch.Tensor, drafts: Drafts, uniforms: torch.Tensor, *, by_block: bool
) -> torch.Tensor:
    """`ratio_test`, or `block_test`, of chains. Returns verdicts.

    probs [rows, width] float32: the law that each row's token was drawn from, 0 where there is none; the width may be
    less or more than the vocabulary's. uniforms [rows]: of each token's test, and at the last row of the token to draw.
    """
    rows, vocab = laws.weights.shape
    sequences, blocks = len(drafts.first_row), laws.sums.shape[1]
    device = laws.weights.device
    tests = _Tests(*torch.empty((5, rows), dtype=torch.float64, device=device).unbind())
    excess = torch.empty((rows, blocks), dtype=torch.float64, device=device)
    verdicts = torch.empty((sequences, 3 + drafts.most_tokens), dtype=torch.int32, device=device)
    q_sums = sum_blocks(probs)
    width = probs.shape[1]
    _compare[sequences,](
        laws.weights, laws.sums, probs, q_sums, drafts.first_row, drafts.num_tokens, drafts.token, tests, verdicts,
        vocab, width, blocks, q_sums.shape[1], verdicts.stride(0),
        BY_BLOCK=by_block, Q_BLOCKS=power_of_2(q_sums.shape[1]), NUM_BLOCKS=power_of_2(blocks), **EXACT,
    )  # fmt: skip
    _sum_excess[rows, blocks](laws.weights, probs, tests, excess, vocab, width, BLOCK=block_size(vocab), **EXACT)
    _judge[sequences,](
        laws.weights, laws.best.value, laws.best.token, laws.sums, probs, excess, drafts.first_row, drafts.num_tokens,
        tests, uniforms, verdicts, vocab, width, blocks, verdicts.stride(0),
        BY_BLOCK=by_block, BLOCK=block_size(vocab), NUM_BLOCKS=power_of_2(blocks), **EXACT,
    )  # fmt: skip
    return verdicts


def sum_blocks(values: torch.Tensor) -> torch.Tensor:
    """Sums [rows, blocks] in float64 of values [rows, width]."""
    rows, width = values.shape
    sums = torch.empty((rows, triton.cdiv(width, block_size(width))), dtype=torch.float64, device=values.device)
    _sum_blocks[rows, sums.shape[1]](values, sums, width, values.stride(0), BLOCK=block_size(width), **EXACT)
    return sums


@triton.jit
def _inverse(x):
    """1 / x, and 0 where there is no mass."""
    return tl.where(x > 0, 1.0 / tl.where(x > 0, x, 1.0), 0.0)


@triton.jit
def _fault_of(best):
    return tl.where(best == float("inf"), _NOT_FINITE, tl.where(best == float("-inf"), _NO_TOKEN, _SOUND))


@triton.jit
def _walk(
    value, token, first_row, num_tokens, draft_token, draft_parent, verdicts, num_blocks,
    NUM_BLOCKS: tl.constexpr, NODES: tl.constexpr,
):  # fmt: skip
    seq = tl.program_id(0)
    first = tl.load(first_row + seq)
    nodes = tl.arange(0, NODES)
    mine = nodes < tl.load(num_tokens + seq)
    tokens = tl.load(draft_token + first + nodes, mask=mine, other=-1)
    parents = tl.load(draft_parent + first + nodes, mask=mine, other=-2)
    verdict = verdicts + seq * (NODES + _FIELDS)

    best, sample = best_of_row(value, token, first, num_blocks, NUM_BLOCKS)
    node = tl.min(tl.where((parents == -1) & (tokens == sample), nodes, NODES), 0)
    num_accepted = tl.full([], 0, tl.int32)
    while (node < NODES) & (_fault_of(best) == _SOUND):
        tl.store(verdict + _FIELDS + num_accepted, node)
        num_accepted += 1
        best, sample = best_of_row(value, token, first + 1 + node, num_blocks, NUM_BLOCKS)
        node = tl.min(tl.where((parents == node) & (tokens == sample), nodes, NODES), 0)
    tl.store(verdict, _fault_of(best))
    tl.store(verdict + 1, sample)
    tl.store(verdict + 2, num_accepted)


@triton.jit
def _sum_blocks(values, sums, width, stride, BLOCK: tl.constexpr):
    row, block = tl.program_id(0), tl.program_id(1)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(values + row.to(tl.int64) * stride + ids, mask=ids < width, other=0.0).to(tl.float64)
    tl.store(sums + row * tl.num_programs(1) + block, tl.sum(x, 0))


@triton.jit
def _row_sum(sums, row, num_blocks, NUM_BLOCKS: tl.constexpr):
    blocks = tl.arange(0, NUM_BLOCKS)
    return tl.sum(tl.load(sums + row * num_blocks + blocks, mask=blocks < num_blocks, other=0.0), 0)


@triton.jit
def _compare(
    weights, sums, probs, q_sums, first_row, num_tokens, draft_token, tests, verdicts, vocab, width,
    num_blocks, q_blocks, verdict_size, BY_BLOCK: tl.constexpr, Q_BLOCKS: tl.constexpr, NUM_BLOCKS: tl.constexpr,
):  # fmt: skip
    """Of each draft token, what the target and the draft gave it, and rho of the prefix before its row."""
    seq = tl.program_id(0)
    first, n = tl.load(first_row + seq), tl.load(num_tokens + seq)
    fault = tl.full([], _SOUND, tl.int32)
    rho = tl.full([], 1.0, tl.float64)
    for i in range(n + 1):
        row = first + i
        p_scale = _inverse(_row_sum(sums, row, num_blocks, NUM_BLOCKS))
        q_sum = _row_sum(q_sums, row, q_blocks, Q_BLOCKS)
        fault = tl.where((i < n) & ((q_sum > 0) & (q_sum < float("inf")) == 0), _NO_DRAFT_LAW, fault)
        q_scale = _inverse(q_sum)
        token = tl.load(draft_token + row)
        here = row.to(tl.int64)
        p = tl.load(weights + here * vocab + token, mask=(i < n) & (token < vocab), other=0.0) * p_scale
        q = tl.load(probs + here * width + token, mask=(q_scale > 0) & (token < width), other=0.0).to(tl.float64)
        q *= q_scale
        tl.store(tests.p + row, p)
        tl.store(tests.q + row, q)
        tl.store(tests.p_scale + row, p_scale)
        tl.store(tests.q_scale + row, q_scale)
        tl.store(tests.rho + row, rho)
        if BY_BLOCK:
            grown = tl.where(q > 0, tl.minimum(rho * (p / tl.where(q > 0, q, 1.0)), 1.0), 1.0)
            rho = tl.where((rho == 0) | (p == 0), 0.0, grown)
    tl.store(verdicts + seq * verdict_size, fault)


@triton.jit
def _load_excess(weights, probs, row, ids, p_scale, q_scale, vocab, width):
    """[p - q]+ of some tokens, both scaled."""
    here = row.to(tl.int64)
    p = tl.load(weights + here * vocab + ids, mask=ids < vocab, other=0.0).to(tl.float64) * p_scale
    drawn = ids < tl.where(q_scale > 0, width, 0)  # none behind a draft
    q = tl.load(probs + here * width + ids, mask=drawn, other=0.0).to(tl.float64) * q_scale
    return tl.maximum(p - q, 0.0)


@triton.jit
def _sum_excess(weights, probs, tests, excess, vocab, width, BLOCK: tl.constexpr):
    row, block = tl.program_id(0), tl.program_id(1)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    p_scale = tl.load(tests.rho + row) * tl.load(tests.p_scale + row)
    values = _load_excess(weights, probs, row, ids, p_scale, tl.load(tests.q_scale + row), vocab, width)
    tl.store(excess + row * tl.num_programs(1) + block, tl.sum(values, 0))


@triton.jit
def _judge(
    weights, best_value, best_token, sums, probs, excess, first_row, num_tokens,
    tests, uniforms, verdicts, vocab, width, num_blocks, verdict_size,
    BY_BLOCK: tl.constexpr, BLOCK: tl.constexpr, NUM_BLOCKS: tl.constexpr,
):  # fmt: skip
    seq = tl.program_id(0)
    first, n = tl.load(first_row + seq), tl.load(num_tokens + seq)
    verdict = verdicts + seq * verdict_size
    fault = tl.load(verdict)
    num_accepted = tl.full([], 0, tl.int64)
    for i in range(n):
        row = first + i
        u = tl.load(uniforms + row)
        if BY_BLOCK:  # the longest prefix that passes counts, and all rows are looked at
            best, _ = best_of_row(best_value, best_token, row, num_blocks, NUM_BLOCKS)
            fault = tl.where(fault == _SOUND, _fault_of(best), fault)
            mass = _row_sum(excess, row + 1, num_blocks, NUM_BLOCKS)
            left = mass + 1.0 - tl.load(tests.rho + row + 1)
            threshold = tl.where(left > 0, mass / tl.where(left > 0, left, 1.0), 1.0)
            num_accepted = tl.where(u < threshold, i + 1, num_accepted)
        else:  # up to the first failure
            passes = u * tl.load(tests.q + row) < tl.load(tests.p + row)
            num_accepted = tl.where(passes & (num_accepted == i), i + 1, num_accepted)
        tl.store(verdict + _FIELDS + i, i)

    row = first + num_accepted
    best, _ = best_of_row(best_value, best_token, row, num_blocks, NUM_BLOCKS)
    tl.store(verdict, tl.where(fault == _SOUND, _fault_of(best), fault))
    token = _draw(weights, sums, probs, excess, tests, row, tl.load(uniforms + first + n), vocab, width, num_blocks,
                  BLOCK, NUM_BLOCKS)  # fmt: skip
    tl.store(verdict + 1, token)
    tl.store(verdict + 2, num_accepted)


@triton.jit
def _draw(
    weights, sums, probs, excess, tests, row, u, vocab, width, num_blocks,
    BLOCK: tl.constexpr, NUM_BLOCKS: tl.constexpr,
):  # fmt: skip
    """The token where the running sum of [p - q]+ passes u of the total; by rounding the last that has mass.

    Where rounding has left no mass, of p.
    """
    blocks = tl.arange(0, NUM_BLOCKS)
    at = row * num_blocks + blocks
    masses = tl.load(excess + at, mask=blocks < num_blocks, other=0.0)
    has_mass = tl.sum(masses, 0) > 0
    masses = tl.where(has_mass, masses, tl.load(sums + at, mask=blocks < num_blocks, other=0.0))
    p_scale = tl.where(has_mass, tl.load(tests.rho + row) * tl.load(tests.p_scale + row), 1.0)
    q_scale = tl.where(has_mass, tl.load(tests.q_scale + row), 0.0)

    target = u * tl.sum(masses, 0)
    passed = (tl.cumsum(masses, 0) > target) & (masses > 0)
    last = tl.max(tl.where(masses > 0, blocks, 0), 0)
    block = tl.minimum(tl.min(tl.where(passed, blocks, NUM_BLOCKS), 0), last)
    before = tl.sum(tl.where(blocks < block, masses, 0.0), 0)

    ids = block * BLOCK + tl.arange(0, BLOCK)
    mass = _load_excess(weights, probs, row, ids, p_scale, q_scale, vocab, width)
    passed = (before + tl.cumsum(mass, 0) > target) & (mass > 0)
    last = tl.max(tl.where(mass > 0, ids, 0), 0)
    return tl.minimum(tl.min(tl.where(passed, ids, vocab), 0), last)
