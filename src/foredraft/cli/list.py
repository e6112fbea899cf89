"""`foredraft list`: the models on this machine, and those of the catalogue that are not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
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
    from foredraft.models.hub import home_directory, list_models

    models = list_models()
    on_disk = {model.name for model in models}
    missing = [entry for name, entry in CATALOGUE.items() if name not in on_disk]
    if json_target is None:
        write_answer(as_text(models, missing, home_directory()))
        return
    rows = [asdict(model) | {"path": None if model.path is None else str(model.path)} for model in models]
    write_json({"models": rows, "catalogue": [entry.name for entry in missing]}, json_target)


def as_text(models: Sequence[ModelOnDisk], missing: Sequence[CatalogueEntry], home: Path) -> str:
    """At most 80 columns wide, unless names are long. A part without models is left out, heading and all."""
    parts = [
        _table(f"in {home}", [model for model in models if model.is_removable]),
        _table("elsewhere", [model for model in models if not model.is_removable]),
        _offers(missing),
    ]
    if not models:
        parts.insert(0, [f"no models in {home} yet"])
    return "\n\n".join("\n".join(lines) for lines in parts if lines) + "\n"


def _table(place: str, models: Sequence[ModelOnDisk]) -> list[str]:
    from foredraft.models.catalogue import CATALOGUE

    lines = [f"{'file':>7}  {'repacked':>8}  {place}"] if models else []
    for model in models:
        state = "" if model.path is not None else "  (unfinished)" if model.file_bytes else "  (its file is gone)"
        known = CATALOGUE[model.name].note if model.name in CATALOGUE else ""
        about = state or (f"  {known}" if known else "")
        lines.append(f"{format_bytes(model.file_bytes):>7}  {format_bytes(model.packed_bytes):>8}  {model.name}{about}")
    return lines


def _offers(missing: Sequence[CatalogueEntry]) -> list[str]:
    lines = ["foredraft pull gets these:"] if missing else []
    width = max((len(entry.name) for entry in missing), default=0)
    for entry in missing:
        lines.append(f"{format_bytes(entry.nbytes):>7}  {entry.name:<{width}}  {entry.note}".rstrip())
        lines.append(f"{'':7}  {entry.title}, {entry.licence}")
    return lines
