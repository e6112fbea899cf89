"""The application: routes, and the layers that a request passes on its way to them.

RequestLog ─► CORS ─► Authentication ─► BodyLimit ─► a handler ─► AsyncEngine
"""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, PlainTextResponse, Response

from foredraft.engine.async_engine import AsyncEngine
from foredraft.server.answers import (
    ChatCompletion,
    DetokenizeAnswer,
    ErrorAnswer,
    Health,
    ModelCard,
    ModelList,
    TextCompletion,
    TokenizeAnswer,
    Version,
)
from foredraft.server.auth import Authentication
from foredraft.server.chat import create_chat_completion
from foredraft.server.completions import create_completion
from foredraft.server.config import ServerConfig
from foredraft.server.errors import RETRY_AFTER, add_error_handlers
from foredraft.server.limits import BodyLimit
from foredraft.server.logs import RequestLog
from foredraft.server.metrics import CONTENT_TYPE, ServerMetrics
from foredraft.server.service import Service, service_of
from foredraft.server.tokens import detokenize, tokenize
from foredraft.server.web import make_page_routes

_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorAnswer} for status in (400, 401, 404, 408, 413, 429, 500, 503)
}


def make_app(engine: AsyncEngine, config: ServerConfig) -> FastAPI:
    """The ASGI application. It starts the engine with itself, and closes it."""

    @asynccontextmanager
    async def run_engine(_: FastAPI) -> AsyncIterator[None]:
        engine.start()
        yield
        await engine.close()

    app = FastAPI(
        title="foredraft",
        version=_version(),
        lifespan=run_engine,
        docs_url=None,  # they load scripts from elsewhere
        redoc_url=None,
        responses=_ERRORS,
    )
    metrics = ServerMetrics(config.model_names[0], engine.snapshot)
    engine.when_loaded(metrics.attach)
    app.state.service = Service(engine, config, metrics, int(time.time()))
    _add_routes(app)
    add_error_handlers(app)
    app.add_middleware(BodyLimit, max_bytes=config.max_body_bytes, stopping=engine.stopping)
    app.add_middleware(Authentication, keys=config.api_keys)
    if config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(config.allowed_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id"],
        )
    app.add_middleware(RequestLog)
    return app


def _add_routes(app: FastAPI) -> None:
    app.post("/v1/chat/completions", response_model=ChatCompletion)(create_chat_completion)
    app.post("/v1/completions", response_model=TextCompletion)(create_completion)
    app.post("/tokenize", response_model=TokenizeAnswer)(tokenize)
    app.post("/detokenize", response_model=DetokenizeAnswer)(detokenize)
    app.get("/v1/models", response_model=ModelList)(list_models)
    app.get("/v1/models/{name:path}", response_model=ModelCard)(show_model)
    app.get("/health", response_model=Health)(health)
    app.get("/live", response_model=Health)(live)
    app.get("/version", response_model=Version)(version)
    app.get("/metrics", response_class=PlainTextResponse)(show_metrics)
    app.router.routes.extend(make_page_routes())


async def list_models(request: Request) -> ModelList:
    """The names that requests may use, all of one model."""
    service = service_of(request)
    return ModelList(data=[_card(service, name) for name in service.config.model_names])


async def show_model(name: str, request: Request) -> ModelCard:
    service = service_of(request)
    return _card(service, service.model_name(name))


async def health(request: Request) -> JSONResponse:
    """200 once requests are answered; 503 while the model loads, while the server drains, and after a failure."""
    engine = service_of(request).engine
    headers = {} if engine.is_ready else {"retry-after": str(RETRY_AFTER)}
    return JSONResponse({"status": engine.state}, 200 if engine.is_ready else 503, headers)


async def live() -> Health:
    """200 while the process runs."""
    return Health(status="live")


async def show_metrics(request: Request) -> Response:
    """For Prometheus."""
    return Response(service_of(request).metrics.render(), media_type=CONTENT_TYPE)


async def version() -> Version:
    return Version(version=_version())


def _card(service: Service, name: str) -> ModelCard:
    return ModelCard(
        id=name, created=service.started, root=service.config.model_names[0], max_model_len=service.max_model_len
    )


def _version() -> str:
    try:
        return importlib.metadata.version("foredraft")
    except importlib.metadata.PackageNotFoundError:  # running from its sources
        return "0"
