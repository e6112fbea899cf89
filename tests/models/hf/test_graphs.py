"""Captured passes: the conformance tests by replays, whole texts, what is never captured, and what goes wrong.

A tape of operations stands for CUDA graphs, so that all but `CudaCapture` runs here.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import foredraft.hf
from foredraft import LLM, SamplingParams
from foredraft.models.base import Rows
from foredraft.models.hf import graphs, load
from foredraft.models.hf.cache import SlotCache
from foredraft.models.hf.graphs import CudaCapture, StaticPasses, choose_capture, fit
from foredraft.models.hf.layout import Layout, Shape, make_layout, running
from foredraft.models.hf.masks import install_masks
from foredraft.models.hf.model import HFModel
from tests.hf.calls import DRAFTERS, ours
from tests.models.hf import test_passes
from tests.models.hf.folders import write_folder
from tests.models.hf.tape import TapeCapture
from tests.models.hf.test_passes import (
    TABLE,
    TEXT,
    assert_close,
    test_a_limited_head_has_what_was_asked_for,
    test_a_sequence_that_broke_does_not_spoil_its_blocks,
    test_a_tree_has_the_logits_of_its_chains,
    test_no_logits_are_no_rows,
    test_rows_do_not_depend_on_how_many_are_filled_up,
    test_shared_blocks_are_read_by_all,
    test_tensors_where_they_are_wanted,
    test_what_was_rejected_leaves_no_trace,
)
from tests.models.hf.zoo import ARCHITECTURES, VOCAB, make_model, model, prompts

__all__ = [  # run here by replays
    "test_a_limited_head_has_what_was_asked_for",
    "test_a_sequence_that_broke_does_not_spoil_its_blocks",
    "test_a_tree_has_the_logits_of_its_chains",
    "test_no_logits_are_no_rows",
    "test_rows_do_not_depend_on_how_many_are_filled_up",
    "test_shared_blocks_are_read_by_all",
    "test_tensors_where_they_are_wanted",
    "test_what_was_rejected_leaves_no_trace",
]

#: The module: its package has the function by that name.
hf_generate = importlib.import_module("foredraft.hf.generate")
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
PROMPTS = ["the cat sat on", "def add(a, b):", "the dog", "a"]


@pytest.fixture(autouse=True)
def capture(monkeypatch: pytest.MonkeyPatch) -> TapeCapture:
    """Of every model that is made by these tests, by name, or by `generate`."""
    tape = TapeCapture()
    for module in (load, hf_generate):
        monkeypatch.setattr(module, "choose_capture", lambda model, *, enforce_eager: None if enforce_eager else tape)
    monkeypatch.setattr(test_passes, "runner", partial(captured, tape))
    return tape


def captured(tape: TapeCapture, name: str = "llama", **options: Any) -> HFModel:
    return HFModel(capturable(name), name=name, num_blocks=8, capture=tape, **options)


@lru_cache
def capturable(name: str) -> Any:
    """gpt2 looks for its padding token in every pass."""
    return make_model(name, pad_token_id=None) if name == "gpt2" else model(name)


@contextmanager
def one_warning(caplog: pytest.LogCaptureFixture, text: str) -> Iterator[None]:
    with caplog.at_level(logging.WARNING, "foredraft"):
        yield
    (record,) = (record for record in caplog.records if record.name == "foredraft")
    assert text in record.getMessage()
    assert "\n" not in record.getMessage()


def test_a_text_token_by_token_and_by_drafts(capture: TapeCapture) -> None:
    """Two shapes, each captured once, and a prompt that is too long for any."""
    run = captured(capture, max_model_len=256)
    long = TEXT[:70]
    got = [run.forward([Rows(TABLE, 0, long, num_logits=1)])]
    assert capture.num_captures == 0
    for i in range(70, 75):
        got.append(run.forward([Rows(TABLE, i, [TEXT[i]])]))
    for i in (75, 85):
        got.append(run.forward([Rows(TABLE, i, TEXT[i : i + 10], num_logits=10)]))
    wanted = test_passes.own_logits("llama", TEXT[:95])[69:]
    assert_close(np.concatenate(got), wanted)
    assert (capture.num_captures, capture.num_replays) == (2, 7 + 2)  # one of each is its test


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma3_text", "gpt2"])
@pytest.mark.parametrize("num_sequences", [1, 4])
def test_replays_are_what_was_captured_run_again(name: str, num_sequences: int, capture: TapeCapture) -> None:
    """To the bit, for chains and trees: the same kernels over the same shapes."""
    results = []
    for num_uncaptured in (0, 1000):
        run = HFModel(capturable(name), name=name, num_blocks=12, capture=capture, num_uncaptured=num_uncaptured)
        tables = [np.array([3 * i + 1, 3 * i]) for i in range(num_sequences)]
        got = [run.forward([Rows(t, 0, TEXT[7 * i : 7 * i + 20 + i]) for i, t in enumerate(tables)])]
        got += [run.forward([Rows(t, 20 + i, [5 + i]) for i, t in enumerate(tables)])]
        tree = ([8, 9, 10, 11], [-1, -1, 0, 1])
        got += [run.forward([Rows(t, 21 + i, *tree, num_logits=4) for i, t in enumerate(tables)])]
        got += [run.forward([Rows(t, 21 + i, TEXT[50 : 53 + i]) for i, t in enumerate(tables)])]
        results.append(np.concatenate(got))
    assert capture.num_captures == 3
    assert results[0].tobytes() == results[1].tobytes()


@pytest.mark.parametrize("drafter", ["none", "ngram", "model", "ngram+model"])
def test_texts_by_name(drafter: str, tmp_path: Path, capture: TapeCapture) -> None:
    target, draft = write_folder(tmp_path / "target"), write_folder(tmp_path / "draft", "qwen2", seed=4)
    spec = drafter.replace("model", f"model:{draft}")
    options: dict[str, Any] = {"adaptive": False, "num_speculative_tokens": 4, "device": "cpu"}
    with LLM(target, spec, **options, enforce_eager=True) as llm:
        wanted = [c.token_ids for c in llm.generate(PROMPTS, GREEDY)]
    assert capture.num_captures == 0
    with LLM(target, spec, **options) as llm:
        num_at_load = capture.num_captures
        assert num_at_load == (6 if "model" in drafter else 3)  # of one sequence; 1, 8 and 17 rows
        assert [c.token_ids for c in llm.generate(PROMPTS, GREEDY)] == wanted
        assert [c.token_ids for c in llm.generate(PROMPTS[0], GREEDY)] == wanted[:1]
    assert capture.num_captures > num_at_load
    assert capture.num_replays > 20


@pytest.mark.parametrize("spec", DRAFTERS)
@pytest.mark.parametrize("num_pads", [(0,), (0, 3, 7, 1)])
def test_texts_of_generate(
    spec: str, num_pads: tuple[int, ...], capture: TapeCapture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uncaptured passes first, then replays; a call that ends before that captures nothing."""
    monkeypatch.setattr(hf_generate, "NUM_UNCAPTURED", 3)
    arguments = {**prompts(num_pads), "max_new_tokens": 24, "do_sample": False}
    wanted = model("llama").generate(**arguments)
    assert torch.equal(ours(model("llama"), spec, **arguments), wanted)
    assert capture.num_replays > 0
    num_captures = capture.num_captures
    assert torch.equal(ours(model("llama"), spec, enforce_eager=True, **arguments), wanted)
    ours(model("llama"), spec, **arguments | {"max_new_tokens": 1})
    assert capture.num_captures == num_captures


def test_a_draft_changes_no_bit_of_fixed_rows(capture: TapeCapture, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first passes, which are not captured, included; the draft reaches into further blocks than the text."""
    monkeypatch.setattr(hf_generate, "NUM_UNCAPTURED", 4)
    arguments: dict[str, Any] = {**prompts((0,), 30), "max_new_tokens": 40, "do_sample": False}
    arguments |= {"fixed_rows": True, "return_dict_in_generate": True, "output_logits": True}
    plain, drafted = (ours(model("llama"), spec, **arguments) for spec in ("none", "ngram+model"))
    assert torch.equal(plain.sequences, drafted.sequences)
    for one, other in zip(plain.logits[1:], drafted.logits[1:], strict=True):
        assert one.numpy().tobytes() == other.numpy().tobytes()
    assert capture.num_replays > 40


def test_costs_are_those_of_the_same_way(monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_model("llama")
    for enforce_eager in (False, True):
        foredraft.hf.generate(made, **prompts((0,)), max_new_tokens=2, enforce_eager=enforce_eager)
    assert len(made._foredraft_pass_costs) == 2


def test_fillers_are_written_to_nobodys_block() -> None:
    """Neither while capturing, nor in a replay of fewer sequences and rows than its shape has."""
    capture = TapeCapture()
    run = captured(capture)
    run.forward([Rows(np.arange(8), 0, TEXT)])  # too long to be captured
    before = run._cache.layers[1].values[:8].clone()
    run.capture_usual()
    assert torch.equal(run._cache.layers[1].values[:8], before)
    run.forward([Rows(np.array([b]), 5, [7], num_logits=0) for b in range(3)])  # of four sequences
    run.forward([Rows(np.array([b]), 5, [7, 8, 9], num_logits=0) for b in range(3)])  # of eight rows each
    assert capture.num_captures == 5
    changed = (run._cache.layers[1].values[:8] != before).flatten(2).any(dim=2)
    assert changed.nonzero().tolist() == [[b, slot] for b in range(3) for slot in (5, 6, 7)]


def test_shapes() -> None:
    def shape(*sequences: tuple[int, int], fixed_rows: int = 0) -> Shape | None:
        return fit([Rows(TABLE, start, [0] * n) for start, n in sequences], fixed_rows)

    assert shape((0, 1)) == Shape(1, 1, 8)
    assert shape((255, 1)) == Shape(1, 1, 8)
    assert shape((256, 1)) == Shape(1, 1, 16)
    assert shape((248, 2)) == Shape(1, 8, 8)
    assert shape((249, 2)) == Shape(1, 8, 16)
    assert shape((30, 9), (700, 1), (0, 3)) == Shape(4, 17, 32)
    assert shape((0, 65)) == Shape(1, 65, 8)
    assert shape((0, 66)) is None
    assert shape(*[(0, 8)] * 64) == Shape(64, 8, 8)
    assert shape(*[(0, 8)] * 65) is None
    assert {shape((239, n), fixed_rows=17) for n in (1, 8, 17)} == {Shape(1, 17, 8)}
    assert {shape((240, n), fixed_rows=17) for n in (1, 8, 17)} == {Shape(1, 17, 16)}
    assert shape((0, 18), fixed_rows=17) == Shape(1, 65, 8)


def test_what_is_captured_at_load(capture: TapeCapture) -> None:
    run = captured(capture)
    assert run.replays
    run.capture_usual()
    assert capture.num_captures == 3
    captured(capture, fixed_rows=33).capture_usual()
    assert capture.num_captures == 4
    passes = StaticPasses(lambda layout: layout.visible.float(), capture, **options(fixed_rows=5))
    passes.capture_usual(1000)
    assert passes.num_captured == 5 * 3  # 8 to 128 blocks; 5, 8 and 17 rows
    sizes = [(q, 32 * k) for q in (5, 8, 17) for k in (8, 16, 32, 64, 128)]
    assert passes.num_bytes == sum(24 * q + 8 * k + k // 4 + 5 * q * k for q, k in sizes)


def options(**changed: Any) -> dict[str, Any]:
    given = {"name": "tiny", "device": torch.device("cpu"), "scratch": 8, "fixed_rows": 0, "num_uncaptured": 0}
    return given | changed


def test_of_many_shapes_some_run_uncaptured(capture: TapeCapture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MAX_SHAPES", 2)
    run = captured(capture)
    got = [run.forward([Rows(TABLE, 0, TEXT[:n])])[0] for n in (1, 4, 12, 20, 12)]
    assert_close(np.stack(got), test_passes.own_logits("llama", TEXT[:20])[[0, 3, 11, 19, 11]])
    assert (capture.num_captures, capture.num_replays) == (2, 2 + 2)  # one of each is its test


def test_what_else_a_pass_is_asked_for_is_not_captured(capture: TapeCapture) -> None:
    run = captured(capture)
    run.forward([Rows(TABLE, 0, TEXT[:3])], hidden_layers=[0])
    assert run.hidden_states().shape == (1, 3, 32)
    run.forward([Rows(TABLE, 0, [0] * 3, embeddings=np.zeros((3, 32), np.float32))])
    assert capture.num_captures == 0
    run.forward([Rows(TABLE, 0, TEXT[:3])])
    with pytest.raises(ValueError, match="asked for no hidden states"):
        run.hidden_states()


def reads_a_number(states: torch.Tensor, calls: list[int]) -> torch.Tensor:
    return states if states.sum() < 1e9 else -states


def follows_a_mask(states: torch.Tensor, calls: list[int]) -> torch.Tensor:
    return states + states[states > 1e9].sum()


def refuses(states: torch.Tensor, calls: list[int]) -> torch.Tensor:
    if len(calls) == 2:  # the rehearsal went well
        raise RuntimeError("cudaErrorStreamCaptureUnsupported\n  somewhere")
    return states


@pytest.mark.parametrize(
    ("disturb", "warning"),
    [
        (reads_a_number, "tiny: passes run uncaptured: aten._local_scalar_dense.default depends on numbers"),
        (follows_a_mask, "tiny: passes run uncaptured: aten.index.Tensor depends on numbers"),
        (refuses, "tiny: passes run uncaptured: cudaErrorStreamCaptureUnsupported somewhere"),
    ],
)
def test_what_cannot_be_captured_runs_uncaptured(
    disturb: Any, warning: str, capture: TapeCapture, caplog: pytest.LogCaptureFixture
) -> None:
    """With one line in the log."""
    calls: list[int] = []

    def run(layout: Layout) -> torch.Tensor:
        calls.append(1)
        return disturb(layout.tokens[..., None].double(), calls)

    passes = StaticPasses(run, capture, **options())
    with one_warning(caplog, warning):
        got = passes.run([Rows(TABLE, 0, [7])])
        assert got is not None
        assert got.item() == 7
        assert passes.run([Rows(TABLE, 0, [7])]) is None
    assert (passes.num_captured, passes.num_bytes) == (0, 0)


def test_a_model_that_reads_numbers_is_not_captured() -> None:
    """Not even begun: a capture that fails may leave torch in disorder."""
    capture = TapeCapture()
    passes = StaticPasses(lambda layout: reads_a_number(layout.tokens.double(), []), capture, **options())
    assert passes.run([Rows(TABLE, 0, [7])]) is not None
    assert capture.num_captures == 0


def test_a_pass_that_does_something_else_each_time_is_not_captured() -> None:
    """It counts in Python, and would be replayed with the number of the capture."""
    calls: list[int] = []

    def run(layout: Layout) -> torch.Tensor:
        calls.append(1)
        return layout.tokens[..., None].double() * len(calls)

    passes = StaticPasses(run, TapeCapture(), **options())
    got = passes.run([Rows(TABLE, 0, [7])])
    assert got is not None
    assert got.item() == 7 * len(calls)
    assert passes.num_captured == 0


def test_fixed_rows_keep_their_shapes_where_nothing_can_be_captured(capture: TapeCapture) -> None:
    shapes = []

    def run(layout: Layout) -> torch.Tensor:
        shapes.append(tuple(layout.visible.shape))
        return reads_a_number(layout.tokens.double(), [])

    passes = StaticPasses(run, capture, **options(fixed_rows=8))
    for n in (1, 8):
        assert passes.run([Rows(TABLE, 0, [7] * n)]) is not None
    assert set(shapes) == {(1, 1, 8, 256)}


def test_a_model_that_cannot_be_captured_says_what_it_always_says(
    capture: TapeCapture, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = {**prompts((0,)), "max_new_tokens": 8, "do_sample": False}
    wanted = model("gpt2").generate(**arguments)
    monkeypatch.setattr(hf_generate, "NUM_UNCAPTURED", 3)
    with one_warning(caplog, "the model: passes run uncaptured"):
        assert torch.equal(ours(model("gpt2"), "ngram", **arguments), wanted)
    assert capture.num_captures == 0


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_passes_of_these_models_could_be_captured_on_a_device(name: str) -> None:
    """Nothing is read from it or copied to it. The device is one that has no memory, and computes nothing."""
    device = torch.device("meta")
    with device:
        made = make_model(name, dtype=torch.bfloat16, **({"pad_token_id": None} if name == "gpt2" else {}))
    install_masks()
    cache = SlotCache(made.config.num_hidden_layers, 9)
    layout = make_layout([], device, Shape(2, 8, 8), scratch=8)
    with torch.no_grad(), running(layout), graphs._Rehearsal():  # type: ignore[no-untyped-call]
        output = made(input_ids=layout.tokens, position_ids=layout.positions, cache=cache, use_cache=True)
    assert output.logits.shape == (2, 8, VOCAB)


def test_copies_between_host_and_device_are_seen() -> None:
    device = torch.device("meta")
    there, here = torch.zeros(3, device=device), torch.zeros(3, dtype=torch.long)
    for copy in (
        lambda: here.to(device),
        lambda: there.copy_(here),
        lambda: there[here],
        lambda: there.index_put_((here,), there),
        lambda: torch.ops.aten.lift_fresh(there),  # torch.tensor(..., device=...)
    ):
        with (
            pytest.raises(RuntimeError, match="copies between the host and the device"),
            graphs._Rehearsal(),  # type: ignore[no-untyped-call]
        ):
            copy()
    with graphs._Rehearsal():  # type: ignore[no-untyped-call]
        torch.tensor([1, 2]) + here[:2].to(torch.float32)


class FakeCuda:
    """The part of torch.cuda that capturing uses: notes what happens, and has the real signatures."""

    def __init__(self) -> None:
        self.events: list[str] = []

    @contextmanager
    def _inside(self, what: str) -> Iterator[None]:
        self.events.append(f"{what} {{")
        try:
            yield
        finally:
            self.events.append("}")

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        signature = inspect.signature(torch.cuda.graph)

        def graph(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            assert given["pool"] == "pool"
            assert isinstance(given["stream"], FakeStream)
            return self._inside(f"capture {given['capture_error_mode']}")

        monkeypatch.setattr(torch.cuda, "graph", graph)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: FakeStream("side", self.events))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: FakeStream("main", self.events))
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: self._inside(f"on {stream.name}"))
        monkeypatch.setattr(torch.cuda, "device", lambda device: self._inside(f"device {device}"))
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: FakeGraph(self.events))


class FakeStream:
    def __init__(self, name: str, events: list[str]) -> None:
        self.name, self._events = name, events

    def wait_stream(self, other: FakeStream) -> None:
        self._events.append(f"{self.name} waits for {other.name}")


class FakeGraph:
    def __init__(self, events: list[str]) -> None:
        self._events = events

    def replay(self) -> None:
        self._events.append("replay")


def test_how_cuda_graphs_are_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warmed up and captured on a stream of its own, which the others wait for, in one pool."""
    cuda = FakeCuda()
    cuda.patch(monkeypatch)

    def run() -> torch.Tensor:
        cuda.events.append("run")
        return torch.ones(1)

    replay, output = CudaCapture(torch.device("cuda:1"))(run)
    assert " ".join(cuda.events) == (
        "device cuda:1 { side waits for main on side { run capture thread_local { run } } main waits for side }"
    )
    replay()
    assert cuda.events[-1] == "replay"
    assert output.item() == 1


def test_who_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeCuda().patch(monkeypatch)
    here, there = torch.zeros(1), torch.zeros(1, device="meta")
    on_gpu: Any = type("OnGpu", (), {"device": torch.device("cuda:0")})

    def choice(*tensors: Any, enforce_eager: bool = False) -> Any:
        made = type("Model", (), {"parameters": lambda _: tensors[:1], "buffers": lambda _: tensors[1:]})()
        return choose_capture(made, enforce_eager=enforce_eager)

    assert isinstance(choice(on_gpu, on_gpu), CudaCapture)
    assert choice(on_gpu, enforce_eager=True) is None
    with torch.autocast("cpu"):
        assert isinstance(choice(on_gpu), CudaCapture)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "is_autocast_enabled", lambda device: device == "cuda")
        assert choice(on_gpu) is None
    assert choice(on_gpu, here) is None
    assert choice(here) is None
    assert choice(there) is None


def test_a_model_that_cannot_be_captured_at_load_takes_no_more_memory_than_it_needs(
    capture: TapeCapture, caplog: pytest.LogCaptureFixture
) -> None:
    run = HFModel(model("gpt2"), name="gpt2", num_blocks=1000, capture=capture)
    with one_warning(caplog, "gpt2: passes run uncaptured"):
        run.capture_usual()
    assert not run.replays
    assert_close(run.forward([Rows(TABLE, 0, TEXT[:9])]), test_passes.own_logits("gpt2", TEXT[:9])[-1:])
    assert [layer.keys.shape[0] for layer in run._cache.layers] == [6, 6]
