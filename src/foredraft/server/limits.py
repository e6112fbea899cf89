"""How much, and how slowly, a client may send."""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foredraft.server.errors import status_response

#: Seconds for a body to arrive.
BODY_DEADLINE = 60.0


class BodyLimit:
    """ASGI middleware: a request goes on once its whole body is here, and only if that is not too large."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            body = await asyncio.wait_for(self._read(scope, receive), BODY_DEADLINE)
        except _TooLargeError:
            refusal = status_response(413, f"the body is larger than {self._max_bytes} bytes (--max-body-bytes)")
            await refusal(scope, receive, send)
        except asyncio.TimeoutError:
            await status_response(408, f"the body did not arrive within {BODY_DEADLINE:.0f} s")(scope, receive, send)
        else:
            if body is not None:
                scope.setdefault("state", {})["body_bytes"] = len(body)
                await self._app(scope, _replay(body, receive), send)

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


def _replay(body: bytes, receive: Receive) -> Receive:
    """The body as one message, then whatever comes."""
    rest: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Message:
        return rest.pop() if rest else await receive()

    return receive_again
