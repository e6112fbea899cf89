"""Errors as OpenAI's clients know them: {"error": {"message", "type", "param", "code"}} with the right status."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from foredraft.errors import (
    ChatTemplateError,
    EngineUnavailableError,
    ForedraftError,
    GrammarError,
    ParameterError,
    PromptTooLongError,
    QueueFullError,
)

#: Seconds after which a client may try again.
RETRY_AFTER = 1


class ModelNotFoundError(ForedraftError): ...


@dataclass(frozen=True, slots=True)
class Failure:
    """How a kind of error is told."""

    status: int
    type: str = "invalid_request_error"
    code: str | None = None
    param: str | None = None
    may_retry: bool = False


BAD_REQUEST = Failure(400)
INTERNAL = Failure(500, "internal_error", "internal_error")
_UNAVAILABLE = Failure(503, "service_unavailable", "service_unavailable", may_retry=True)

_FAILURES: Mapping[type[ForedraftError], Failure] = {
    ParameterError: BAD_REQUEST,
    ChatTemplateError: Failure(400, param="messages"),
    PromptTooLongError: Failure(400, code="context_length_exceeded"),
    GrammarError: Failure(400, code="grammar_failed"),
    ModelNotFoundError: Failure(404, code="model_not_found", param="model"),
    QueueFullError: Failure(429, "rate_limit_error", "queue_full", may_retry=True),
    EngineUnavailableError: _UNAVAILABLE,
}

#: Fields that clients know by another name than the engine.
_CLIENT_NAMES = {"drafters": "speculation.drafters"}

_OF_STATUS = {
    401: Failure(401, code="invalid_api_key"),
    404: Failure(404, code="not_found"),
    405: Failure(405, code="method_not_allowed"),
    408: Failure(408, code="request_timeout"),
    413: Failure(413, code="request_too_large"),
    503: _UNAVAILABLE,
}


def error_body(message: str, failure: Failure, param: str | None = None) -> dict[str, Any]:
    error = {"message": message, "type": failure.type, "param": param or failure.param, "code": failure.code}
    return {"error": error}


def error_response(message: str, failure: Failure, param: str | None = None) -> JSONResponse:
    headers = {"retry-after": str(RETRY_AFTER)} if failure.may_retry else {}
    return _EscapedJSON(error_body(message, failure, param), failure.status, headers)


def status_response(status: int, message: str) -> JSONResponse:
    """For what is refused before a request is read."""
    return error_response(message, _OF_STATUS[status])


def describe(error: ForedraftError) -> tuple[str, Failure, str | None]:
    """Message, kind and the field that is to blame."""
    failure = next((failure for kind, failure in _FAILURES.items() if isinstance(error, kind)), INTERNAL)
    if isinstance(error, ParameterError | PromptTooLongError):
        return str(error), failure, _CLIENT_NAMES.get(error.field, error.field)
    return str(error), failure, None


def add_error_handlers(app: FastAPI) -> None:
    app.add_exception_handler(ForedraftError, _answer_foredraft_error)
    app.add_exception_handler(RequestValidationError, _answer_validation_error)
    app.add_exception_handler(HTTPException, _answer_http_error)
    app.add_exception_handler(RecursionError, _answer_nesting)
    app.add_exception_handler(Exception, _answer_fault)


class _EscapedJSON(JSONResponse):
    """Messages quote what clients sent, which need not be valid Unicode."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content).encode("ascii")


async def _answer_foredraft_error(_: Request, error: Exception) -> JSONResponse:
    if not isinstance(error, ForedraftError):
        raise error
    return error_response(*describe(error))


async def _answer_validation_error(request: Request, error: Exception) -> JSONResponse:
    if not isinstance(error, RequestValidationError):
        raise error
    problems = error.errors()
    first = problems[0]
    if first["type"] == "json_invalid":
        return error_response(f"the body is not JSON: {first['ctx']['error']}", BAD_REQUEST)
    if isinstance(error.body, bytes):
        return error_response("send a JSON body with the header content-type: application/json", BAD_REQUEST)
    # Where a field may be of several types each has its complaint: the one that came furthest is meant.
    same_field = [e for e in problems if e["loc"][:2] == first["loc"][:2]]
    meant = max(same_field, key=lambda e: len(e["loc"]))
    param = _field_name(meant["loc"])
    message = f"{param}: {meant['msg']}" if param else f"the request's body: {meant['msg']}"
    return error_response(message, BAD_REQUEST, param or None)


async def _answer_http_error(_: Request, error: Exception) -> JSONResponse:
    if not isinstance(error, HTTPException):
        raise error
    failure = _OF_STATUS.get(error.status_code, Failure(error.status_code))
    response = error_response(str(error.detail), failure)
    response.headers.update(error.headers or {})
    return response


async def _answer_nesting(_: Request, error: Exception) -> JSONResponse:
    return error_response("the request's body is nested too deeply", BAD_REQUEST)


async def _answer_fault(_: Request, error: Exception) -> JSONResponse:
    """A fault of ours: what happened goes to the log (by the web server), not to the client."""
    return error_response(f"the server failed ({type(error).__name__}); its log says more", INTERNAL)


def _field_name(location: Sequence[str | int]) -> str:
    """`messages[0].role`: the path in the body without the validator's names of alternatives."""
    name = ""
    for part in location[1:]:
        if isinstance(part, int):
            name += f"[{part}]"
        elif re.fullmatch("[a-z_]+", part) and part not in _TYPE_NAMES:
            name += f".{part}" if name else part
    return name


_TYPE_NAMES = {"str", "int", "float", "bool"}
