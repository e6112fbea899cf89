"""`foredraft list`: the models on this machine, and those of the catalogue that are not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from foredraft.cli.console import format_bytes, write_answer, write_json
from foredraft.cli.options import debug_option, json_option

if TYPE_CHECKING:
    from foredraft.models.catalogue import CatalogueEntry
    from foredraft.models.hub import ModelOnDisk


@click.command("list")
@json_option
@debug_option
def command(json_target: str | None) -> None:
    """Show the models on this machine with the weights repacked from them, and what else the catalogue has."""
    from foredraft.models.catalogue import CATALOGUE
    from foredraft.models.hub import list_models

    models = list_models()
    on_disk = {model.name for model in models}
    missing = [entry for name, entry in CATALOGUE.items() if name not in on_disk]
    if json_target is None:
        write_answer(as_text(models, missing))
        return
    rows = [asdict(model) | {"path": None if model.path is None else str(model.path)} for model in models]
    write_json({"models": rows, "catalogue": [entry.name for entry in missing]}, json_target)


def as_text(models: Sequence[ModelOnDisk], missing: Sequence[CatalogueEntry]) -> str:
    rows = [("name", "file", "repacked", "where")]
    for model in models:
        where = "unfinished download" if model.path is None else str(model.path)
        rows.append((model.name, format_bytes(model.file_bytes), format_bytes(model.packed_bytes), where))
    for entry in missing:
        note = f"{entry.title}, {entry.licence}{'; ' + entry.note if entry.note else ''}"
        rows.append((entry.name, format_bytes(entry.nbytes), "-", f"not here; foredraft pull gets it: {note}"))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "".join(
        f"{name:<{widths[0]}}  {file:>{widths[1]}}  {repacked:>{widths[2]}}  {where}\n"
        for name, file, repacked, where in rows
    )
