"""This process as rank 0 of several, and the life of the others."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any, ClassVar, TypeVar
from weakref import finalize, ref

import torch
import torch.distributed
from torch.distributed.distributed_c10d import _abort_process_group

from foredraft.errors import EngineFailedError, ForedraftError
from foredraft.models.hf.follower import Answer, Call, Drop, Load, Place, join, reason_of

_T = TypeVar("_T")
_TOLD = TypeVar("_TOLD", Load, Call)

#: Starts a follower with the paths of this process, wherever its modules come from.
_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from foredraft.models.hf.follower import main; main(int(sys.argv[2]))"
)
#: Seconds in which two that tell of the same fault do so, and in which a thread ends whose peers are gone.
GRACE_S = 5.0


class Ranks:
    """The processes that run a model together. torch.distributed has one world a process, so there is one of these.

    Invariants: all collective work is done by one thread, in which nothing cuts it short (whoever waits for it may be
    interrupted, by Ctrl-C or because a process is lost); the followers are told of each piece of it first, in the same
    order; once a process is lost, or a piece has failed, no other begins.
    """

    _current: ClassVar[ref[Ranks] | None] = None
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, size: int) -> None:
        self.size = size
        self.num_threads = torch.get_num_threads()  # to share out
        self._num_loaded = 0
        self._open: set[int] = set()  # numbers of the models that are in use
        self._loading = threading.Lock()
        self._state = _State()
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        cleanup = ExitStack()
        self._stop = finalize(self, cleanup.close)
        try:
            cleanup.callback(torch.set_num_threads, self.num_threads)
            folder = cleanup.enter_context(tempfile.TemporaryDirectory(prefix="foredraft-"))
            _stay_on_loopback(cleanup)
            thread = threading.Thread(target=_work, args=(self._jobs,), name="foredraft-rank0", daemon=True)
            thread.start()
            cleanup.callback(_end_thread, thread, self._jobs)
            followers = [_start(rank, cleanup) for rank in range(1, size)]
            self._followers = [follower.connection for follower in followers]
            for follower in followers:
                threading.Thread(target=_listen, args=(follower, size, self._state), daemon=True).start()
            self._wait_for_answers()
            self._run(partial(self._meet, str(Path(folder, "store"))))
            self._wait_for_answers()
        except BaseException:
            self._stop()
            raise

    @classmethod
    def of_this_process(cls, size: int) -> Ranks:
        """Those that run, or new ones. Raises ForedraftError if other ranks run here."""
        with cls._lock:
            current = None if cls._current is None else cls._current()
            if current is not None and current.is_alive:
                if current.size != size:
                    raise ForedraftError(
                        f"tensor parallelism of size {current.size} runs in this process already, and there is one "
                        "size a process: close that LLM first"
                    )
                return current
            if torch.distributed.is_initialized():
                raise ForedraftError(
                    "torch.distributed is in use in this process, and tensor_parallel_size starts ranks of its own: "
                    "run it without torchrun, in a process of its own"
                )
            made = cls(size)
            cls._current = ref(made)
            return made

    @property
    def is_alive(self) -> bool:
        return self._stop.alive and self._state.loss is None

    def load(self, told: Callable[[int], Load], own: Callable[[Load], _T]) -> tuple[int, _T]:
        """Load a model on all ranks. Returns its number and this rank's."""
        with self._loading:
            number = self._num_loaded
            self._num_loaded += 1
            try:
                model = self.together(told(number), own)
                self._wait_for_answers()
            except BaseException:
                self._stop()
                raise
            self._open.add(number)
            return number, model

    def together(self, told: _TOLD, own: Callable[[_TOLD], _T]) -> _T:
        """Have the others do what they are told, and do this process's part.

        Raises what that part raises, and EngineFailedError if a process was lost; the ranks have ended then.
        """
        copy = pickle.dumps(told)  # for all of them: whoever is interrupted may change what was given

        def job() -> _T:
            self._tell(copy)
            result = own(pickle.loads(copy))
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # without a lost rank a GPU waits for ever, and that should be here
            return result

        return self._run(job)

    def drop(self, number: int) -> None:
        """Free a model everywhere. The ranks end with the last."""
        self._open.discard(number)
        if self._open and self.is_alive:
            self._jobs.put(_Job(partial(self._tell, pickle.dumps(Drop(number)))))
        else:
            self._state.lose("the model was closed")
            self._stop()

    def _meet(self, store: str) -> None:
        for rank, connection in enumerate(self._followers, start=1):
            connection.send(Place(rank, self.size, store))
        join(Place(0, self.size, store))

    def _tell(self, pickled: bytes) -> None:
        for connection in self._followers:
            connection.send_bytes(pickled)

    def _run(self, work: Callable[[], _T]) -> _T:
        state = self._state
        if state.loss is not None:
            self._stop()
            raise EngineFailedError(state.loss)
        job = _Job(work)
        job.outcome.add_done_callback(lambda _: state.notify())
        self._jobs.put(job)
        state.wait(job.outcome.done)
        if state.loss is not None:  # both may tell of the same fault, and this process's own words are the better ones
            state.wait(job.outcome.done, GRACE_S, in_spite_of_loss=True)
        failure = job.outcome.exception() if job.outcome.done() else None
        if state.loss is None and failure is None:
            result: _T = job.outcome.result()
            return result
        if not isinstance(failure, ForedraftError | None):  # because another has ended, it may be
            state.wait(lambda: False, GRACE_S)
        loss = state.loss
        state.lose(f"tensor parallelism has failed: {failure and reason_of(failure)}")
        self._stop()
        if failure is not None and (loss is None or isinstance(failure, ForedraftError)):
            raise failure
        raise EngineFailedError(str(loss)) from None

    def _wait_for_answers(self) -> None:
        """Of all followers."""
        state = self._state
        state.wait(lambda: state.num_answers >= self.size - 1)
        if state.loss is not None:
            self._stop()
            raise EngineFailedError(state.loss)
        state.num_answers = 0


class _State:
    """What the threads know of the followers. `loss`: why they cannot go on."""

    def __init__(self) -> None:
        self.loss: str | None = None
        self.num_answers = 0
        self._changed = threading.Condition()

    def wait(self, done: Callable[[], bool], timeout: float | None = None, *, in_spite_of_loss: bool = False) -> None:
        """Until it is done, or a follower lost."""
        with self._changed:
            self._changed.wait_for(lambda: done() or (self.loss is not None and not in_spite_of_loss), timeout)

    def notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def answer(self) -> None:
        with self._changed:
            self.num_answers += 1
            self._changed.notify_all()

    def lose(self, why: str) -> None:
        """The first reason counts."""
        with self._changed:
            self.loss = self.loss or why
            self._changed.notify_all()


@dataclass(frozen=True, slots=True)
class _Job:
    work: Callable[[], Any]
    outcome: Future[Any] = field(default_factory=Future)


@dataclass(frozen=True, slots=True)
class _Follower:
    rank: int
    process: subprocess.Popen[bytes]
    connection: Connection
    errors: IO[bytes]  # what it writes to stderr


def _start(rank: int, cleanup: ExitStack) -> _Follower:
    """In a session of its own, so that Ctrl-C reaches rank 0 alone."""
    ours, theirs = Pipe()
    errors = tempfile.TemporaryFile()  # noqa: SIM115  # as long as the process
    cleanup.callback(errors.close)
    paths = json.dumps([path for path in sys.path if isinstance(path, str)])
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-c", _START, paths, str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env=os.environ | {"LOCAL_RANK": str(rank)},
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
    cleanup.callback(_end_process, process)
    return _Follower(rank, process, ours, errors)


def _end_process(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def _listen(follower: _Follower, size: int, state: _State) -> None:
    """A thread for each follower."""
    name = f"rank {follower.rank} of {size}"
    try:
        while True:
            answer: Answer = follower.connection.recv()
            if answer.failure is None:
                state.answer()
            else:
                state.lose(f"{name}: {answer.failure}")
    except (EOFError, OSError):
        state.lose(f"{name} {_how_it_ended(follower)}")


def _how_it_ended(follower: _Follower) -> str:
    code = follower.process.wait()
    if code < 0:
        return (
            f"(process {follower.process.pid}) was ended by {signal.Signals(-code).name}, and the model is not whole "
            "without it: look whether memory ran out, and start again"
        )
    with suppress(ValueError):  # closed: we ended it ourselves
        follower.errors.seek(0)
        lines = follower.errors.read().decode(errors="replace").split("\n")
        last = next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")
        return f"(process {follower.process.pid}) has ended with status {code}: {last[:300]}"
    return "has ended"


def _work(jobs: SimpleQueue[_Job | None]) -> None:
    """The thread of all collective work."""
    failure = None  # perhaps of a job that nobody waits for any more; the others may be in the midst of it
    while (job := jobs.get()) is not None:
        try:
            if failure is not None:
                raise EngineFailedError(f"tensor parallelism has failed: {failure}")
            result = job.work()
        except BaseException as error:
            failure = failure or reason_of(error)
            outcome = partial(job.outcome.set_exception, error)
        else:
            outcome = partial(job.outcome.set_result, result)
        with suppress(InvalidStateError):
            outcome()
        del job, outcome
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _end_thread(thread: threading.Thread, jobs: SimpleQueue[_Job | None]) -> None:
    jobs.put(None)
    if thread is threading.current_thread():  # garbage may be collected in any
        return
    thread.join(GRACE_S)
    if thread.is_alive() and torch.distributed.is_initialized() and torch.distributed.get_backend() == "nccl":
        _abort_process_group()  # gloo sees by itself that its peers are gone


def _stay_on_loopback(cleanup: ExitStack) -> None:
    """Gloo asks for its interface by a variable; it would take that of the machine's name, which may come and go."""
    variable = "GLOO_SOCKET_IFNAME"
    if variable not in os.environ:
        os.environ[variable] = "lo0" if sys.platform == "darwin" else "lo"
        cleanup.callback(os.environ.pop, variable, None)
