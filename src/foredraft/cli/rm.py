"""`foredraft rm`: models and the weights repacked from them."""

from __future__ import annotations

import click

from foredraft.cli.console import format_bytes, note
from foredraft.cli.options import debug_option


@click.command("rm")
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@debug_option
def command(names: tuple[str, ...]) -> None:
    """Remove models by the names that `foredraft list` shows, and the weights repacked from them.

    Of a model outside the cache only the repacked weights are removed.
    """
    from foredraft.models.hub import remove_model

    for name in names:
        note(f"{name}: {format_bytes(remove_model(name))} freed")
