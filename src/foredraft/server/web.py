"""The page at `/`: static files, and the headers that keep it to itself."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from importlib.resources import files
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

#: File -> media type. Nothing else of the package is ever served.
MEDIA_TYPES = {
    "index.html": "text/html; charset=utf-8",
    "page.css": "text/css; charset=utf-8",
    "page.js": "text/javascript; charset=utf-8",
    "answer.js": "text/javascript; charset=utf-8",
    "stream.js": "text/javascript; charset=utf-8",
    "icon.svg": "image/svg+xml",
}

#: Own files and the own API only; no inline code; no markup from text (Trusted Types); in nobody's frame.
SECURITY_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


def make_page_routes() -> list[Route]:
    """`/` and what it needs below `/page/`. No API key is asked for: they hold no data, and the page asks for it."""
    folder = files("foredraft.server") / "page"
    return [
        Route("/" if name == "index.html" else f"/page/{name}", _static((folder / name).read_bytes(), media_type))
        for name, media_type in MEDIA_TYPES.items()
    ]


def _static(content: bytes, media_type: str) -> Callable[[Request], Coroutine[Any, Any, Response]]:
    async def respond(request: Request) -> Response:
        return Response(content, media_type=media_type, headers=SECURITY_HEADERS)

    return respond
