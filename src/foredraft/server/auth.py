"""API keys, and what keeps their holders' cached prompts apart."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from foredraft.server.errors import status_response

#: Paths that tell nothing of anybody's requests.
OPEN_PATHS = frozenset({"/", "/health", "/live", "/metrics", "/version", "/openapi.json"})
OPEN_FOLDERS = ("/page/",)


class Authentication:
    """ASGI middleware: without one of the keys as a bearer token only the open paths answer."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [_digest(key) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not self._digests or _is_open(scope["path"]):
            await self._app(scope, receive, send)
            return
        scheme, *rest = Headers(scope=scope).get("authorization", "").split(maxsplit=1) or [""]
        given = _digest("".join(rest).strip())
        # Every key is compared, and digests in constant time: the time tells nothing of the keys.
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        if scheme.lower() != "bearer" or not any(matches):
            refusal = status_response(401, "give a valid API key: authorization: Bearer KEY")
            refusal.headers["www-authenticate"] = "Bearer"
            await refusal(scope, receive, send)
            return
        scope["state"]["tenant"] = given.hex()
        await self._app(scope, receive, send)


def prefix_salt(tenant: str, cache_salt: str, *, share: bool) -> str:
    """Prompts are cached within equal salts only: those of one API key (unless keys share) and one `cache_salt`."""
    owner = "" if share else tenant
    return (
        hashlib.sha256(f"{owner}\n{cache_salt}".encode("utf-8", "surrogatepass")).hexdigest()
        if owner or cache_salt
        else ""
    )


def _is_open(path: str) -> bool:
    return path in OPEN_PATHS or path.startswith(OPEN_FOLDERS)


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
