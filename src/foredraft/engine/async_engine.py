"""An engine in a thread of its own, beside an event loop that never waits for a pass.

    event loop                        engine thread
    submit, close ──► inbox ────────► Generator.submit, Generator.abort      between two steps
    AnswerStreams ◄── one call ◄───── Generator.step                         for all chunks of a step

Only messages cross. What belongs to the loop (streams, state) the thread never touches; the thread's generator the loop
uses only for what cannot change: its tokenizer and the sizes of its model.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from threading import Thread
from time import perf_counter
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

from foredraft.engine.generator import Generator, PreparedRequest
from foredraft.engine.stats import EngineSnapshot
from foredraft.errors import (
    EngineFailedError,
    EngineUnavailableError,
    ForedraftError,
    ParameterError,
    QueueFullError,
)
from foredraft.types import Chunk, SamplingParams

if TYPE_CHECKING:
    from typing_extensions import Self

logger = logging.getLogger("foredraft")

_T = TypeVar("_T")

EngineState = Literal["loading", "ready", "draining", "stopped", "failed"]

#: Requests that are prepared at once: one with a large grammar must not hold up the others' of its kind.
NUM_PREPARERS = 2
#: Prompt tokens that are checked faster than a thread is asked to do it.
FEW_TOKENS = 4_000

_REFUSALS: dict[EngineState, str] = {
    "loading": "the model is still loading; try again in a moment",
    "draining": "the server is about to stop and takes no more requests",
    "stopped": "the server has stopped",
}


class ChunkObserver(Protocol):
    """Sees a request's chunks the moment they come, however slowly its client reads."""

    def observe(self, chunk: Chunk, now: float) -> None: ...
    def end(self) -> None:
        """No more will come: all choices have ended, or the request was closed."""
        ...


class AsyncEngine:
    """The event loop's side. All methods are for the loop that called `start`.

    load: makes the generator, in the engine's thread; it should give up once `is_stopping`.
    max_num_waiting: a request is refused if with its own sequences more would wait.
    """

    def __init__(self, load: Callable[[], Generator], *, max_num_waiting: int) -> None:
        self.state: EngineState = "loading"
        self._max_num_waiting = max_num_waiting
        self._worker = _Worker(load, self._post)
        self._thread = Thread(target=self._worker.run, name="foredraft-engine", daemon=True)
        self._generator: Generator | None = None
        self._load_error: BaseException | None = None
        self._error: ForedraftError | None = None  # why it failed
        self._snapshot = EngineSnapshot(0, 0, 0, 0.0, 0, 0)
        self._num_sent = 0  # sequences that the snapshot does not count yet
        self._open: set[AnswerStream] = set()
        self._preparing = ThreadPoolExecutor(NUM_PREPARERS, "foredraft-prepare")
        self.stopping = asyncio.Event()  # set once no more requests are taken for good
        self._idle = asyncio.Event()
        self._idle.set()
        self._settled = asyncio.Event()  # loaded, or failed to

    def when_loaded(self, hook: Callable[[Generator], None]) -> None:
        """Have `hook` called in the engine's thread, after loading and before the first step. Call before `start`."""
        self._worker.when_loaded = hook

    def start(self) -> None:
        """Begin to load. Call once, with the loop running."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def loaded(self) -> Generator:
        """Waits until the model is there. Raises whatever loading raised."""
        await self._settled.wait()
        if self._load_error is not None:
            raise self._load_error
        return self.generator

    @property
    def is_ready(self) -> bool:
        return self.state == "ready"

    @property
    def is_stopping(self) -> bool:
        """May be asked from any thread."""
        return self.state in ("draining", "stopped")

    @property
    def generator(self) -> Generator:
        """Raises EngineUnavailableError while it loads."""
        self._refuse_unless("ready", "draining")
        if self._generator is None:
            raise EngineUnavailableError(_REFUSALS["loading"])
        return self._generator

    def snapshot(self) -> EngineSnapshot:
        """The load after the last step."""
        return self._snapshot

    @property
    def num_waiting(self) -> int:
        """Sequences that wait, those included that the engine has not seen yet."""
        return self._snapshot.num_waiting + self._num_sent

    @property
    def is_idle(self) -> bool:
        """Whether no request is open."""
        return not self._open

    async def submit(
        self,
        prompts: SequenceOf[SequenceOf[int]],
        params: SamplingParams,
        *,
        cache_salt: str = "",
        observer: ChunkObserver | None = None,
    ) -> AnswerStream:
        """Queue all choices of all prompts. Use the stream as a context manager: leaving it early aborts the rest.

        Raises ParameterError, PromptTooLongError, QueueFullError, EngineUnavailableError, EngineFailedError.
        """
        self._refuse_unless("ready")
        num_choices = len(prompts) * params.n
        self._refuse_unless_room(num_choices)
        request = await self._prepare(prompts, params)
        self._refuse_unless("ready")  # time has passed
        self._refuse_unless_room(num_choices)
        stream = AnswerStream(num_choices, observer, self._loop.create_future(), self._close)
        self._num_sent += num_choices
        self._open.add(stream)
        self._idle.clear()
        self._worker.inbox.put(_Submit(stream, request, cache_salt))
        try:
            await stream.accepted
        except BaseException:
            stream.close()
            raise
        return stream

    async def run_beside(self, work: Callable[[], _T]) -> _T:
        """The result of `work`, which takes long or much memory: few run at once, and neither loop nor engine waits."""
        return await self._loop.run_in_executor(self._preparing, work)

    @property
    def num_open(self) -> int:
        """Requests whose answers are not complete, or not read."""
        return len(self._open)

    async def drain(self) -> None:
        """Take no more requests, and wait for the end of those that run."""
        if self.state in ("loading", "ready"):
            self.state = "draining"
        self.stopping.set()
        await self._idle.wait()

    async def close(self) -> None:
        """Fail what still runs, and wait for the thread's end, which comes after its pass."""
        if self.state != "failed":
            self.state = "stopped"
        self.stopping.set()
        self._end_streams(EngineUnavailableError(_REFUSALS["stopped"]))
        self._preparing.shutdown(wait=False)
        self._worker.inbox.put(None)
        while self._thread.is_alive():
            await asyncio.sleep(0.005)

    def _refuse_unless(self, *states: EngineState) -> None:
        if self._error is not None:
            raise self._error
        if self.state not in states:
            raise EngineUnavailableError(_REFUSALS[self.state])

    async def _prepare(self, prompts: SequenceOf[SequenceOf[int]], params: SamplingParams) -> PreparedRequest:
        """Neither the loop nor the engine's thread waits for what takes long."""
        generator = self.generator

        def prepare() -> PreparedRequest:
            self._refuse_unless("ready")
            return generator.prepare(prompts, params)

        takes_long = params.structured_outputs or params.prediction or sum(map(len, prompts)) > FEW_TOKENS
        return await self.run_beside(prepare) if takes_long else prepare()

    def _refuse_unless_room(self, num_choices: int) -> None:
        """Room is in the batch and in the queue together: what may run at once does not count as waiting."""
        room = self.generator.max_num_seqs + self._max_num_waiting
        if num_choices > room:
            raise ParameterError(
                "n", f"asks for {num_choices} answers, all prompts together, and this server takes {room} at most"
            )
        if self._snapshot.num_running + self.num_waiting + num_choices > room:
            raise QueueFullError(
                f"{self.num_waiting} answers wait already and {num_choices} more are too many; try again in a moment"
            )

    def _close(self, stream: AnswerStream) -> None:
        """The stream has ended, or nobody reads it any more."""
        self._open.discard(stream)
        if not self._open:
            self._idle.set()
        if stream.num_unfinished:
            self._worker.inbox.put(_Abort(stream))

    def _end_streams(self, error: ForedraftError) -> None:
        for stream in list(self._open):
            stream.fail(error)

    def _post(self, report: _Report) -> None:
        """Called in the engine's thread."""
        try:
            self._loop.call_soon_threadsafe(self._receive, report)
        except RuntimeError:  # the loop has ended: nobody listens any more
            logger.debug("a report came after the event loop's end")

    def _receive(self, report: _Report) -> None:
        if report.failure is not None:
            self._fail(report.failure)
            return
        if report.generator is not None:
            self._generator = report.generator
            self.state = "ready" if self.state == "loading" else self.state
            self._settled.set()
        for stream, error in report.answered:
            self._num_sent -= stream.num_choices
            stream.answer(error)
        if report.snapshot is not None:
            self._snapshot = report.snapshot
        now = perf_counter()
        for stream, chunk in report.chunks:
            stream.receive(chunk, now)

    def _fail(self, failure: BaseException) -> None:
        if not self._settled.is_set():
            self._load_error = failure
            self._settled.set()
        self.state = "failed"
        self._error = EngineFailedError(f"the engine broke down ({type(failure).__name__}); restart the server")
        self._end_streams(self._error)


class AnswerStream:
    """The chunks of all choices of one request, in batches as they come. Choice j of prompt i has index i * n + j."""

    def __init__(
        self,
        num_choices: int,
        observer: ChunkObserver | None,
        accepted: asyncio.Future[None],
        on_close: Callable[[AnswerStream], None],
    ) -> None:
        self.num_choices = num_choices
        self.num_unfinished = num_choices
        self.accepted = accepted  # by the engine: it is well-formed, and queued
        self._observer = observer
        self._on_close = on_close
        self._is_closed = False
        self._chunks: list[Chunk] = []
        self._error: ForedraftError | None = None
        self._news = asyncio.Event()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[Chunk]:
        """All chunks that have come since. Raises what ended the request, once the chunks before it are read."""
        while not self._chunks:
            if self._error is not None:
                raise self._error
            if self.num_unfinished == 0:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        chunks, self._chunks = self._chunks, []
        return chunks

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def answer(self, error: ForedraftError | None) -> None:
        """The engine has queued it, or says why not."""
        if error is not None:
            self.num_unfinished = 0
            self._observer = None  # it never ran
            self.fail(error)
        elif not self.accepted.done():
            self.accepted.set_result(None)

    def receive(self, chunk: Chunk, now: float) -> None:
        if self._is_closed:
            return
        if self._observer is not None:
            self._observer.observe(chunk, now)
        if chunk.finish_reason is not None:
            self.num_unfinished -= 1
        if chunk.error is not None:
            self.fail(chunk.error)
            return
        self._chunks.append(chunk)
        self._news.set()
        if self.num_unfinished == 0:
            self.close()

    def fail(self, error: ForedraftError) -> None:
        if not self.accepted.done():
            self.accepted.set_exception(error)
        self._error = error
        self._news.set()
        self.close()

    def close(self) -> None:
        """Nothing more is wanted: what still runs is aborted before the next step."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._observer is not None:
            self._observer.end()
        self._on_close(self)


@dataclass(frozen=True, slots=True)
class _Submit:
    stream: AnswerStream  # the thread only hands it back
    request: PreparedRequest
    cache_salt: str


@dataclass(frozen=True, slots=True)
class _Abort:
    stream: AnswerStream


_Command = _Submit | _Abort | None  # None: end


_Answered = tuple[AnswerStream, ForedraftError | None]  # whether a submission was taken, and why not


@dataclass(frozen=True, slots=True)
class _Report:
    """What the thread tells the loop after each step, and before it of what was submitted."""

    generator: Generator | None = None  # it has just been loaded
    failure: BaseException | None = None  # and no further report will come
    answered: list[_Answered] = field(default_factory=list)
    chunks: list[tuple[AnswerStream, Chunk]] = field(default_factory=list)
    snapshot: EngineSnapshot | None = None


@dataclass(slots=True)
class _Request:
    """One prompt of a stream, while the engine works on it."""

    stream: AnswerStream
    first: int  # index of its first choice
    num_unfinished: int


class _Worker:
    """The engine thread's side. Everything but the inbox is the thread's own."""

    def __init__(self, load: Callable[[], Generator], post: Callable[[_Report], None]) -> None:
        self.inbox: SimpleQueue[_Command] = SimpleQueue()
        self.when_loaded: Callable[[Generator], None] = lambda generator: None
        self._load = load
        self._post = post
        self._requests: dict[int, _Request] = {}

    def run(self) -> None:
        generator = None
        try:
            generator = self._load()
            generator.prepare_grammars()
            self.when_loaded(generator)
            self._post(_Report(generator=generator))
            while (answered := self._obey(generator)) is not None:
                if answered:  # a request learns that it is well-formed before the pass, which may be long
                    self._post(_Report(answered=answered, snapshot=generator.snapshot()))
                self._post(_Report(chunks=self._step(generator), snapshot=generator.snapshot()))
            generator.close()
        except Exception as error:
            if not isinstance(error, ForedraftError):
                logger.exception("the engine broke down")
            elif generator is not None:  # what loading raises is told by whoever waits for it
                logger.error("the engine broke down: %s", error)
            self._post(_Report(failure=error))

    def _obey(self, generator: Generator) -> list[_Answered] | None:
        """Carries out what came in, and waits for it if there is nothing to compute. None: it is over."""
        answered: list[_Answered] = []
        must_wait = not generator.has_unfinished
        if must_wait:
            generator.engine.check_integrity()
        while must_wait or not self.inbox.empty():
            command = self.inbox.get()
            must_wait = False
            if command is None:
                return None
            if isinstance(command, _Abort):
                self._abort(generator, command.stream)
            else:
                answered.append((command.stream, self._submit(generator, command)))
        return answered

    def _submit(self, generator: Generator, command: _Submit) -> ForedraftError | None:
        """All prompts or none. Returns why not."""
        num_choices = command.request.params.n
        try:
            seqs = generator.submit_prepared(command.request, cache_salt=command.cache_salt)
        except ForedraftError as error:
            return error
        for first in range(0, len(seqs), num_choices):
            self._requests[seqs[first].request_id] = _Request(command.stream, first, num_choices)
        return None

    def _abort(self, generator: Generator, stream: AnswerStream) -> None:
        for request_id in [id for id, request in self._requests.items() if request.stream is stream]:
            generator.abort(request_id)
            del self._requests[request_id]

    def _step(self, generator: Generator) -> list[tuple[AnswerStream, Chunk]]:
        if not generator.has_unfinished:
            return []
        chunks = []
        for chunk in generator.step():
            request = self._requests[chunk.request_id]
            chunks.append((request.stream, _renumbered(chunk, request.first)))
            request.num_unfinished -= chunk.finish_reason is not None
            if request.num_unfinished == 0:
                del self._requests[chunk.request_id]
        return chunks


def _renumbered(chunk: Chunk, first: int) -> Chunk:
    """first: index of the first choice of its prompt."""
    index, completion = first + chunk.index, chunk.completion
    return replace(chunk, index=index, completion=None if completion is None else replace(completion, index=index))
