"""What all handlers share: the engine, the settings, and care for the event loop and for clients that leave."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from foredraft.engine.async_engine import AsyncEngine
from foredraft.models.base import TextTokenizer
from foredraft.server.config import ServerConfig
from foredraft.server.errors import ModelNotFoundError
from foredraft.server.metrics import ServerMetrics

_T = TypeVar("_T")

#: Bytes of a request whose text becomes tokens faster than a thread is asked to do it.
SMALL_REQUEST = 4_000

#: What a web server answers to nobody: nginx's status for clients that left.
CLIENT_LEFT = 499


@dataclass(frozen=True, slots=True)
class Service:
    """One server's. `started`: seconds since the epoch."""

    engine: AsyncEngine
    config: ServerConfig
    metrics: ServerMetrics
    started: int
    tokenizing: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1))  # whole texts, for their ids

    @property
    def tokenizer(self) -> TextTokenizer:
        """Raises EngineUnavailableError while the model loads."""
        return self.engine.generator.tokenizer

    @property
    def max_model_len(self) -> int:
        return self.engine.generator.model.max_model_len

    def model_name(self, asked: str | None) -> str:
        """Raises ModelNotFoundError for a model that is not served here."""
        names = self.config.model_names
        if asked is not None and asked not in names:
            raise ModelNotFoundError(f"the model {asked[:200]!r} is not served here; served: {', '.join(names)}")
        return names[0] if asked is None else asked


def service_of(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


def size_of(request: Request) -> int:
    """Bytes of its body: a bound for every text and list in it."""
    size: int = request.state.body_bytes
    return size


async def off_loop(size: int, work: Callable[[], _T]) -> _T:
    """The result of `work`, done in another thread if the request is large (size: bytes of its body)."""
    return work() if size < SMALL_REQUEST else await asyncio.to_thread(work)


async def unless_client_leaves(request: Request, answer: Coroutine[Any, Any, Response]) -> Response:
    """Gives `answer` up when its client closes the connection."""
    working = asyncio.ensure_future(answer)
    leaving = asyncio.ensure_future(_client_left(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return await working if working.done() else Response(status_code=CLIENT_LEFT)
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _client_left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
