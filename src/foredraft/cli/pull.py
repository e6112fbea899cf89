"""`foredraft pull`: models from the catalogue or the hub, before they are needed."""

from __future__ import annotations

from functools import partial

import click

from foredraft.cli.console import write_answer
from foredraft.cli.options import debug_option
from foredraft.cli.progress import Progress


@click.command("pull")
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@debug_option
def command(names: tuple[str, ...]) -> None:
    """Download models by catalogue name or hub id org/repo[:file.gguf]. Prints where each file or folder is.

    Of a repository without a .gguf file the safetensors come, with settings and tokenizer. What is on disk already is
    not downloaded again; a download that was interrupted goes on.
    """
    from foredraft.models.hub import pull

    for name in names:
        with Progress() as progress:
            path = pull(name, partial(progress, f"downloading {name}"))
        write_answer(f"{path}\n")
