"""Flags of the server itself, beside those of its engine. Defaults are those of ServerConfig."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from foredraft.cli.options import Command, collect, shown
from foredraft.server.config import ServerConfig

KEY_VARIABLE = "FOREDRAFT_API_KEY"


def server_options(command: Command) -> Command:
    """Adds the flags of ServerConfig; the command gets them as `config`, whose names are empty if none were given."""
    flags = [
        click.option(
            "--served-model-name", "model_names", multiple=True, metavar="NAME", help="Instead of MODEL. Repeatable."
        ),
        click.option(
            "--api-key",
            "api_keys",
            multiple=True,
            metavar="KEY",
            help=f"Ask for one of these keys. Repeatable. [default: the words of {KEY_VARIABLE}]",
        ),
        click.option(
            "--allowed-origins",
            multiple=True,
            metavar="ORIGIN",
            help="Web pages that may ask (CORS), * for all. Repeatable. [default: none]",
        ),
        click.option(
            "--max-num-waiting",
            type=click.IntRange(1),
            help=f"Answers that may wait; requests beyond get status 429.{shown('max_num_waiting', ServerConfig)}",
        ),
        click.option(
            "--max-body-bytes", type=click.IntRange(1), help=f"Largest request.{shown('max_body_bytes', ServerConfig)}"
        ),
        click.option(
            "--max-completion-tokens",
            type=click.IntRange(1),
            help="Longest answer that may be asked for. [default: what the context holds]",
        ),
        click.option(
            "--stream-interval",
            type=click.IntRange(1),
            help=f"Tokens that a streamed event gathers.{shown('stream_interval', ServerConfig)}",
        ),
        click.option(
            "--stream-padding",
            type=click.IntRange(0, 65536),
            metavar="BYTES",
            help="Pad streamed events to multiples of this size. [default: no padding]",
        ),
        click.option(
            "--share-prefix-cache", is_flag=True, default=None, help="Different API keys share cached prompts."
        ),
        click.option("--log-prompts", is_flag=True, default=None, help="Write the ids of prompts to the log."),
    ]
    return collect(command, flags, "config", _make_config)


def _make_config(given: Mapping[str, Any]) -> ServerConfig:
    return ServerConfig(**{"model_names": (), **given})
