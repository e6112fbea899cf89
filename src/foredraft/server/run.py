"""The application in this process: one socket, one event loop, and what signals mean.

loading ──► ready ──SIGTERM, SIGINT──► draining ──idle, a second signal, or the time is up──► stopped
"""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import signal
import socket
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext

import uvicorn

from foredraft.engine.async_engine import AsyncEngine
from foredraft.errors import ForedraftError
from foredraft.server.app import make_app
from foredraft.server.config import ServerConfig
from foredraft.server.limits import HTTPConnection

logger = logging.getLogger("foredraft.server")

#: Connections that the system accepts for us before we do; so many may come at once.
BACKLOG = 128
#: Open files that are enough for any load that we know.
MAX_FILES = 65_536
#: After the last answer has ended.
FLUSH_SECONDS = 1


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one. Raises ForedraftError."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            problem = "it is taken; choose another with --port"
        else:
            problem = f"{error.strerror or error}; choose others with --host and --port"
        raise ForedraftError(f"cannot listen on {host}, port {port}: {problem}") from error


def url_of(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def serve(
    engine: AsyncEngine,
    config: ServerConfig,
    sock: socket.socket,
    *,
    on_ready: Callable[[], None],
    drain_timeout: int,
) -> signal.Signals | None:
    """Serves until a signal, which it returns. Raises what loading the model raised.

    drain_timeout: seconds for running requests to end after the first signal, and for clients to read their answers. If
    they are over, FLUSH_SECONDS are left for clients to read that theirs was aborted.
    """

    class Connection(HTTPConnection):
        max_connections = _room_for_connections()

    settings = uvicorn.Config(
        make_app(engine, config),
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="off",  # the engine's life is ours: a second signal leaves no time for the application's end
        backlog=BACKLOG,
        http=Connection,
        ws="none",
    )
    loop = asyncio.get_running_loop()
    deadline = loop.time()
    server = _Server(settings)
    with _Signals() as signals:
        engine.start()
        serving = asyncio.create_task(server.serve(sockets=[sock]))
        try:
            await _first_of(engine.loaded(), signals.first.wait(), asyncio.shield(serving))
            if engine.is_ready:
                on_ready()
            await _first_of(signals.first.wait(), asyncio.shield(serving))
            deadline = loop.time() + drain_timeout
            if engine.num_open:
                logger.info(
                    "stopping: %d requests still run, for %d s at most, and no more are taken; "
                    "a second signal aborts them",
                    engine.num_open,
                    drain_timeout,
                )
            await asyncio.wait_for(_first_of(engine.drain(), signals.second.wait()), drain_timeout)
        except asyncio.TimeoutError:
            logger.warning("requests still ran after %d s and were aborted", drain_timeout)
        finally:
            await _first_of(engine.close(), signals.second.wait())
            settings.timeout_graceful_shutdown = max(FLUSH_SECONDS, int(deadline - loop.time()))
            server.should_exit = True
            await _first_of(asyncio.shield(serving), signals.second.wait())
            serving.cancel()
    return signals.received


def _room_for_connections() -> int:
    """Asks for as many open files as this process may have; some are left for others than connections.

    Without a descriptor left, a connection can be neither accepted nor refused.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    files = MAX_FILES if soft == resource.RLIM_INFINITY else min(soft, MAX_FILES)
    return max(files // 2, files - 3 * BACKLOG)


async def _first_of(*awaitables: Awaitable[object]) -> None:
    """Waits until one is done, and raises what it raised. The others are cancelled."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()


class _Server(uvicorn.Server):
    """Signals are ours."""

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return nullcontext()


class _Signals:
    """SIGTERM and SIGINT: the first asks to drain, the second to stop at once. Later ones find it stopped already."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        self.received: signal.Signals | None = None

    def __enter__(self) -> _Signals:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._receive, number)
        return self

    def __exit__(self, *_: object) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().remove_signal_handler(number)
            if self.first.is_set():
                signal.signal(number, signal.SIG_IGN)

    def _receive(self, number: signal.Signals) -> None:
        if self.first.is_set():
            self.second.set()
        self.received = number
        self.first.set()
