"""One line a request, without its text unless the operator wants it; as JSON where a machine reads it."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import asdict, dataclass, field
from secrets import token_hex
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

logger = logging.getLogger("foredraft.requests")

#: Asked every few seconds by machines.
QUIET_PATHS = frozenset({"/health", "/live", "/metrics"})


@dataclass(slots=True)
class RequestRecord:
    """What the log tells of a request; handlers fill in what they learn."""

    request_id: str
    method: str
    path: str
    status: int | None = None  # None: the client left before it was told
    seconds: float = 0.0
    model: str | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    finish_reasons: list[str] = field(default_factory=list)
    prompt: Any = None  # with `log_prompts` only


class RequestLog:
    """ASGI middleware: gives each request an id (header x-request-id) and logs it when it is over."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope.get("raw_path", scope["path"].encode("utf-8", "replace")).decode("latin-1")
        record = RequestRecord(token_hex(16), scope["method"], path)
        scope.setdefault("state", {})["record"] = record
        began = time.monotonic()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", record.request_id.encode())]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            record.seconds = round(time.monotonic() - began, 4)
            if scope["path"] not in QUIET_PATHS:
                logger.info(_sentence(record), extra={"request": record})


class JSONLines(logging.Formatter):
    """A JSON object a record: time, level, logger, message; the fields of a request."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        request = getattr(record, "request", None)
        if isinstance(request, RequestRecord):
            line |= {name: value for name, value in asdict(request).items() if value not in (None, [])}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


def _sentence(record: RequestRecord) -> str:
    words = f"{record.method} {record.path} {record.status or 'client left'} in {record.seconds:.3f} s"
    if record.prompt_tokens is not None:
        words += f", {record.prompt_tokens} prompt tokens"
    if record.completion_tokens is not None:
        words += f", {record.completion_tokens} completion tokens ({', '.join(record.finish_reasons) or 'cut'})"
    words += f", id {record.request_id}"
    if record.prompt is not None:
        words += f", prompt {json.dumps(record.prompt)}"
    return words
