"""How much, and how slowly, a client may send."""

from __future__ import annotations

import asyncio
import logging
from time import monotonic

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from foredraft.server.errors import status_response

logger = logging.getLogger("foredraft.server")

#: Seconds between two lines about connections that were closed because there were too many.
SILENCE = 10.0
#: Seconds for a request's line and headers to arrive, from the connection's begin or the end of the request before.
HEADERS_DEADLINE = 60.0
#: Seconds for a body to arrive.
BODY_DEADLINE = 60.0


class HTTPConnection(H11Protocol):
    """A connection that is closed when no whole head of a request arrives in time, and at once if there are too many.

    The timer runs while no request is being answered: from the connection's begin, and from each answer's end.
    """

    max_connections = 1000
    _timer: asyncio.TimerHandle | None = None
    _told = -SILENCE  # when a line about too many was logged, of all connections

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()
        if len(self.connections) > self.max_connections:
            if monotonic() - HTTPConnection._told > SILENCE:
                HTTPConnection._told = monotonic()
                logger.warning("%d connections are open: more are closed at once", self.max_connections)
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        super().handle_events()
        if self._is_answering():
            self._stop_timer()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._is_answering() and not self.transport.is_closing():
            self._start_timer()

    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _start_timer(self) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(HEADERS_DEADLINE, self.transport.close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class BodyLimit:
    """ASGI middleware: a request goes on once its whole body is here, and only if that is not too large.

    stopping: once it is set no body is waited for.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, stopping: asyncio.Event) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._stopping = stopping

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            body = await self._read_in_time(scope, receive)
        except _TooLargeError:
            refusal = status_response(413, f"the body is larger than {self._max_bytes} bytes (--max-body-bytes)")
            await refusal(scope, receive, send)
        except asyncio.TimeoutError:
            await status_response(408, f"the body did not arrive within {BODY_DEADLINE:.0f} s")(scope, receive, send)
        except _StoppingError:
            await status_response(503, "the server is about to stop and waits for no more bodies")(scope, receive, send)
        else:
            if body is not None:
                scope.setdefault("state", {})["body_bytes"] = len(body)
                await self._app(scope, _replay(body, receive), send)

    async def _read_in_time(self, scope: Scope, receive: Receive) -> bytes | None:
        reading = asyncio.ensure_future(self._read(scope, receive))
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait({reading, stopping}, timeout=BODY_DEADLINE, return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                return reading.result()
            raise _StoppingError if stopping.done() else asyncio.TimeoutError
        finally:
            reading.cancel()
            stopping.cancel()
            await asyncio.gather(reading, stopping, return_exceptions=True)

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        """None: the client has gone."""
        announced = Headers(scope=scope).get("content-length", "")
        if announced.isdecimal() and int(announced) > self._max_bytes:
            raise _TooLargeError
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            if len(body) > self._max_bytes:
                raise _TooLargeError
            if not message.get("more_body", False):
                return bytes(body)


class _TooLargeError(Exception): ...


class _StoppingError(Exception): ...


def _replay(body: bytes, receive: Receive) -> Receive:
    """The body as one message, then whatever comes."""
    rest: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Message:
        return rest.pop() if rest else await receive()

    return receive_again
