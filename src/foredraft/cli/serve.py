"""`foredraft serve`: the OpenAI API over a model, until a signal."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from foredraft.cli.console import Session
from foredraft.cli.options import EngineOptions, debug_option, open_llm, served_engine_options
from foredraft.cli.server_options import KEY_VARIABLE, server_options
from foredraft.server.config import ServerConfig
from foredraft.server.logs import JSONLines

if TYPE_CHECKING:
    from foredraft.engine.llm import LLM

logger = logging.getLogger("foredraft.server")


@click.command("serve")
@served_engine_options
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0 takes a free one.")
@server_options
@click.option(
    "--drain-timeout",
    type=click.IntRange(1),
    default=120,
    show_default=True,
    help="Seconds for running requests after SIGTERM or Ctrl-C; a second one stops at once.",
)
@click.option("--log-format", type=click.Choice(("text", "json")), default="text", show_default=True)
@debug_option
@click.pass_obj
def command(
    session: Session,
    options: EngineOptions,
    host: str,
    port: int,
    config: ServerConfig,
    drain_timeout: int,
    log_format: str,
) -> int:
    """Serve MODEL over the OpenAI API.

    It is a .gguf file, a catalogue name, a hub id org/repo[:file.gguf], or a folder of Transformers.
    """
    if "" in config.api_keys:
        raise click.UsageError("--api-key is empty: it would let everybody in")
    if not all(key.isascii() and key.isprintable() and key == key.strip() for key in config.api_keys):
        raise click.UsageError("--api-key takes visible ASCII characters: no client could send another key")
    config = replace(
        config,
        model_names=config.model_names or (options.model,),
        api_keys=config.api_keys or tuple(os.environ.get(KEY_VARIABLE, "").split()),
    )
    for name in config.model_names:
        if not name.isprintable() or name != name.strip() or not name:
            raise click.UsageError(f"{name!a} cannot be a model's name: give visible characters by --served-model-name")
    _prepare_log(log_format)
    received = _serve(session, options, config, host, port, drain_timeout)
    return 130 if received == signal.SIGINT else 0


def _serve(
    session: Session, options: EngineOptions, config: ServerConfig, host: str, port: int, drain_timeout: int
) -> signal.Signals | None:
    """Returns the signal that ended it."""
    from foredraft.engine.async_engine import AsyncEngine
    from foredraft.server.run import listen, serve, url_of

    with listen(host, port) as sock:
        url = url_of(sock)
        if not config.api_keys and host not in ("127.0.0.1", "::1", "localhost"):
            logger.warning("whoever reaches %s may use the model; --api-key asks for a key", url)
        logger.info("loading %s; until it is ready, %s/v1 answers 503", options.model, url)

        async def run() -> signal.Signals | None:
            def load() -> LLM:
                return open_llm(options, session, lambda: engine.is_stopping)

            engine = AsyncEngine(load, max_num_waiting=config.max_num_waiting)
            return await serve(engine, config, sock, on_ready=tell, drain_timeout=drain_timeout)

        def tell() -> None:
            names = ", ".join(config.model_names)
            logger.info("ready: %s/v1 serves %s, drafter %s; a page to chat: %s/", url, names, options.drafter, url)

        return asyncio.run(run())


def _prepare_log(log_format: str) -> None:
    """Lines of requests and of the server itself are shown; the web server's own only where something is wrong."""
    handlers = logging.getLogger("foredraft").handlers
    for name in ("foredraft.server", "foredraft.requests"):
        logging.getLogger(name).setLevel(logging.INFO)
    web = logging.getLogger("uvicorn.error")
    web.setLevel(logging.WARNING)
    web.propagate = False
    for handler in handlers:
        if log_format == "json":
            handler.setFormatter(JSONLines())
        web.addHandler(handler)
