"""Short passes in few fixed shapes, each captured once and then replayed, as vLLM does.

Launching a pass from Python takes a GPU longer than computing one over few rows. A captured pass is one launch, over
the same memory every time:

    rows ─► the least shape that holds them ─► copied into its buffers ─► replay ─► its output
            what is filled up is written to a block that nobody reads

What captures is a `Capture`: CUDA graphs on a GPU, and in tests of this module a tape of operations. Where a model's
pass cannot be captured, or a replay is not what the model computes, passes run uncaptured.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from foredraft.models.base import BLOCK_SIZE, Rows
from foredraft.models.hf.layout import Layout, Shape, make_layout
from foredraft.types import MAX_DRAFT

logger = logging.getLogger("foredraft")

#: Rows a sequence: a token, short drafts, drafts of the default length, the longest.
NUM_QUERIES = (1, 8, 17, MAX_DRAFT + 1)
#: Rows of all sequences, fillers too. Computing more takes longer than launching.
MAX_ROWS = 512
#: The least blocks of a sequence; other shapes have twice as many, four times as many, ...
LEAST_BLOCKS = 8
#: Captured at load: the shapes of one sequence, up to so many blocks and rows.
BLOCKS_AT_LOAD, QUERIES_AT_LOAD = 128, 17
#: Shapes that are captured; what needs another runs uncaptured.
MAX_SHAPES = 64
#: How far a replay may be from an uncaptured pass over the same inputs, as a share of the greatest number.
TOLERANCE, LOW_PRECISION_TOLERANCE = 1e-3, 0.05

#: A pass over a layout: [B, Q, width].
Run = Callable[[Layout], torch.Tensor]
#: Runs a function as often as it needs, and returns what repeats its operations, and the tensor that this fills.
Capture = Callable[[Callable[[], torch.Tensor]], tuple[Callable[[], None], torch.Tensor]]


class StaticPasses:
    """The short passes of a model, by `run`, with a cache that has `scratch` for a block of nobody's.

    fixed_rows: see `HFModel`. num_uncaptured: so many passes run before the first is captured, for models that may not
    run long enough to make up for it. Not thread-safe.
    """

    def __init__(
        self,
        run: Run,
        capture: Capture,
        *,
        name: str,
        device: torch.device,
        scratch: int,
        fixed_rows: int,
        num_uncaptured: int,
    ) -> None:
        self._run = run
        self._capture: Capture | None = capture
        self._name = name
        self._device = device
        self._scratch = scratch
        self._fixed_rows = fixed_rows
        self._num_uncaptured = num_uncaptured
        self._captured: dict[Shape, _Captured] = {}

    @property
    def num_captured(self) -> int:
        return len(self._captured)

    @property
    def num_bytes(self) -> int:
        """Of inputs and outputs, beside what a `Capture` holds for what lies between them."""
        return sum(captured.num_bytes for captured in self._captured.values())

    def run(self, batch: Sequence[Rows]) -> torch.Tensor | None:
        """What `run` gives for a batch, valid until the next pass; None if the batch has no shape, or passes cannot be
        captured. Those of fixed rows keep their shapes all the same, so that no text changes kernels half-way."""
        shape = fit(batch, self._fixed_rows)
        if shape is None or (self._capture is None and not self._fixed_rows):
            return None
        if self._num_uncaptured > 0:
            self._num_uncaptured -= 1
        elif shape not in self._captured and len(self._captured) < MAX_SHAPES:
            self._make([shape])
        captured = self._captured.get(shape)
        if captured is None:
            return self._run(make_layout(batch, self._device, shape, self._scratch))
        return captured.repeat(make_layout(batch, torch.device("cpu"), shape, self._scratch))

    def capture_usual(self, max_blocks: int) -> None:
        """The shapes of one sequence that reads up to `max_blocks`, within limits."""
        queries = [n for n in _num_queries(self._fixed_rows) if n <= max(QUERIES_AT_LOAD, self._fixed_rows)]
        most = _power_of_two(min(max_blocks, BLOCKS_AT_LOAD))
        blocks = [LEAST_BLOCKS]
        while blocks[-1] < most:
            blocks.append(2 * blocks[-1])
        self._make([Shape(1, num_queries, num_blocks) for num_blocks in blocks for num_queries in queries])

    def _make(self, shapes: Sequence[Shape]) -> None:
        if self._capture is None:
            return
        began = perf_counter()
        try:
            for shape in shapes:
                self._captured[shape] = _captured(shape, self._run, self._capture, self._device, self._scratch)
        except Exception as error:  # whatever it is, the model runs without
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            logger.warning("%s: passes run uncaptured: %s", self._name, reason)
            self._capture = None
            self._captured.clear()
            return
        what = f"{len(shapes)} shapes of passes" if len(shapes) > 1 else f"a pass of {shapes[0]}"
        seconds, mib = perf_counter() - began, self.num_bytes / 2**20
        logger.info("%s: %s captured in %.2f s; buffers of all take %.1f MiB", self._name, what, seconds, mib)


@dataclass(frozen=True, slots=True)
class _Captured:
    """A shape's buffers, what repeats the pass over them, and where its output is then."""

    inputs: Layout
    replay: Callable[[], None]
    output: torch.Tensor

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (*_tensors(self.inputs), self.output))

    def repeat(self, layout: Layout) -> torch.Tensor:
        for buffer, values in zip(_tensors(self.inputs), _tensors(layout), strict=True):
            buffer.copy_(values)
        self.replay()
        return self.output


def _captured(shape: Shape, run: Run, capture: Capture, device: torch.device, scratch: int) -> _Captured:
    """Over fillers, then held against the pass itself over a text in the scratch block: nobody's blocks are written."""
    layout = make_layout([], device, shape, scratch)
    with _Rehearsal():  # type: ignore[no-untyped-call]
        run(layout)
    captured = _Captured(layout, *capture(lambda: run(layout)))
    # Slot 0 is the fillers'. A slot that two rows write may end as either.
    text = [Rows(np.full(1, scratch), 1, range(1, 1 + min(shape.num_queries, BLOCK_SIZE - 1)))]
    again = captured.repeat(make_layout(text, torch.device("cpu"), shape, scratch))
    if not _is_close(again, run(make_layout(text, device, shape, scratch))):
        raise RuntimeError("a replay differs from the pass that was captured")
    return captured


class CudaCapture:
    """CUDA graphs of one device. They share the memory of what lies between inputs and outputs: one runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._device):
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):  # left also where capturing fails, which torch's own does not
                run()  # libraries make their handles and workspaces for this stream
                with torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"):
                    output = run()
            torch.cuda.current_stream().wait_stream(self._stream)
        return graph.replay, output


def choose_capture(model: Any, *, enforce_eager: bool) -> Capture | None:
    """CUDA graphs for a model that is on one GPU as a whole, unless it is to run as it is.

    Autocast keeps casted weights for as long as its context lasts, which may end before a graph does.
    """
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    device = devices.pop()
    if enforce_eager or devices or device.type != "cuda" or torch.is_autocast_enabled("cuda"):
        return None
    return CudaCapture(device)


def fit(batch: Sequence[Rows], fixed_rows: int) -> Shape | None:
    """The least of the shapes that hold a batch. Of `fixed_rows`, it does not depend on the draft."""
    longest = max(len(rows.tokens) for rows in batch)
    num_queries = next((n for n in _num_queries(fixed_rows) if n >= longest), None)
    num_sequences = _power_of_two(len(batch))
    if num_queries is None or num_sequences * num_queries > MAX_ROWS:
        return None
    num_slots = max(rows.start for rows in batch) + num_queries
    return Shape(num_sequences, num_queries, max(LEAST_BLOCKS, _power_of_two(-(-num_slots // BLOCK_SIZE))))


def _num_queries(fixed_rows: int) -> list[int]:
    return [fixed_rows] * (fixed_rows > 0) + [n for n in NUM_QUERIES if n > fixed_rows]


def _power_of_two(count: int) -> int:
    """The least that is no smaller."""
    return 1 << (count - 1).bit_length()


def _tensors(layout: Layout) -> tuple[torch.Tensor, ...]:
    return layout.tokens, layout.positions, layout.key_positions, layout.visible, layout.blocks, layout.slots


def _is_close(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    tolerance = TOLERANCE if wanted.dtype in (torch.float32, torch.float64) else LOW_PRECISION_TOLERANCE
    greatest = torch.nan_to_num(wanted, posinf=0.0, neginf=0.0).abs().max()
    return torch.allclose(got, wanted, rtol=0.0, atol=tolerance * float(greatest), equal_nan=True)


class _Rehearsal(TorchDispatchMode):  # type: ignore[no-untyped-call]  # the library's class is untyped
    """Refuses what no capture can repeat: a number read by Python, a shape that follows from numbers, a copy from or to
    the host. A capture that fails half-way may leave torch's allocator in disorder, so it is not begun."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _depends_on_numbers(func, args):
            raise RuntimeError(f"{func} depends on numbers that the pass computes")
        output = func(*args, **(kwargs or {}))
        if _crosses(func, args, output):
            raise RuntimeError(f"{func} copies between the host and the device")
        return output


_ATEN: Any = torch.ops.aten
_BY_INDICES = (_ATEN.index.Tensor, _ATEN.index_put_.default, _ATEN.index_put.default)


def _depends_on_numbers(func: Any, args: Sequence[Any]) -> bool:
    if func in _BY_INDICES:  # a mask is turned into indices, which takes a look at it
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags


def _crosses(func: Any, args: Sequence[Any], output: Any) -> bool:
    if func in _BY_INDICES:
        return any(index is not None and index.device != args[0].device for index in args[1])
    if func is _ATEN.lift_fresh.default:  # torch.tensor
        return bool(output.device.type != "cpu")
    if func is _ATEN.copy_.default:
        return bool(args[0].device != args[1].device)
    return func is _ATEN._to_copy.default and bool(args[0].device != output.device)
