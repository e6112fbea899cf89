"""Threads: how many by default, one pool for several decoders, one pass at a time."""

from __future__ import annotations

import os
import threading

import pytest
from tests.native.tiny_decoders import FAMILIES, Span, build_native, forward, make_decoder, run_chunks

from foredraft import _native


@pytest.mark.parametrize("threads", [0, -1, 257, 1 << 20])
def test_absurd_thread_counts_are_refused(threads):
    with pytest.raises(ValueError, match="threads must be in"):
        _native.ThreadPool(threads)


def test_default_threads_follow_the_affinity_mask():
    if not hasattr(os, "sched_getaffinity"):  # macOS has no masks
        assert 1 <= _native.default_threads() <= (os.cpu_count() or 1)
        return
    allowed = os.sched_getaffinity(0)
    assert 1 <= _native.default_threads() <= len(allowed)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert _native.default_threads() == 1
    finally:
        os.sched_setaffinity(0, allowed)


def test_a_pool_outlives_its_name():
    """The decoder keeps its pool; workers are joined when the last decoder goes."""
    decoder = build_native(make_decoder(FAMILIES["llama"]), _native.ThreadPool(3))
    assert run_chunks(decoder, [1, 2, 3], 3).shape == (3, 100)


def test_two_decoders_share_a_pool():
    """From two threads at once: whoever finds the pool busy works alone, with the same bits."""
    pool = _native.ThreadPool(2)
    model = make_decoder(FAMILIES["qwen2"], "Q8_0")
    tokens = list(range(60))
    expected = run_chunks(build_native(model, pool), tokens, 60)
    wrong: list[int] = []

    def work() -> None:
        decoder = build_native(model, pool)
        wrong.extend(i for i in range(30) if (run_chunks(decoder, tokens, 20) != expected).any())

    workers = [threading.Thread(target=work) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert wrong == []


def test_a_second_pass_at_the_same_time_is_refused():
    decoder = build_native(make_decoder(FAMILIES["llama"]), _native.ThreadPool(1))
    refused = threading.Event()

    def work() -> None:
        cache = decoder.make_cache(40, half=True)
        while not refused.is_set():
            try:
                forward(decoder, cache, [Span(list(range(40)), 0, [1] * 1000, num_logits=0)])
            except RuntimeError:
                refused.set()

    workers = [threading.Thread(target=work) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=20)
    assert refused.is_set()
    assert run_chunks(decoder, [1, 2], 2).shape == (2, 100)
