"""`foredraft doctor`: what this machine and this installation can do."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from foredraft.cli.console import format_bytes, write_answer, write_json
from foredraft.cli.options import debug_option, json_option
from foredraft.errors import ModelFileError, NativeCoreError

#: Extra -> the modules that it brings.
EXTRAS: Mapping[str, Sequence[str]] = {
    "hf": ("torch", "transformers"),
    "peers": ("llama_cpp", "torch", "transformers", "gguf"),
}
#: Read to measure the memory: more than any cache holds.
BANDWIDTH_BYTES = 512 << 20
BANDWIDTH_REPEATS = 3


@click.command("doctor")
@json_option
@debug_option
def command(json_target: str | None) -> None:
    """Show kernel set, memory bandwidth, threads, caches, damaged ones too, and missing extras."""
    core_error = None
    try:
        core = describe_core()
    except NativeCoreError as error:
        core, core_error = {"kernel_set": None}, error
    report = {"installation": describe_installation(), "core": core, "caches": describe_caches()}
    if json_target is None:
        write_answer(as_text(report))
    else:
        write_json(report, json_target)
    if core_error is not None:
        raise core_error


def describe_installation() -> dict[str, Any]:
    try:
        version = importlib.metadata.version("foredraft")
    except importlib.metadata.PackageNotFoundError:
        version = "not installed"
    return {
        "foredraft": version,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {_processor()}",
        "missing_extras": {
            extra: missing
            for extra, modules in EXTRAS.items()
            if (missing := [module for module in modules if importlib.util.find_spec(module) is None])
        },
    }


def describe_core() -> dict[str, Any]:
    """Kernel sets, best first, threads, and the read bandwidth measured now, in GB/s."""
    from foredraft.models.gguf import load_core

    core = load_core()
    sets: Sequence[str] = core.kernel_sets()
    forced = os.environ.get("FOREDRAFT_KERNELS")
    if forced and forced not in sets:
        raise NativeCoreError(f"FOREDRAFT_KERNELS={forced} cannot run here; choose one of: {', '.join(sets)}")
    threads: int = core.default_threads()
    read: Callable[[int, int, int], Sequence[float]] = core.time_reading  # bytes a second
    return {
        "kernel_set": forced or sets[0],
        "kernel_sets": list(sets),
        "threads": threads,
        "read_gb_per_s": round(max(read(BANDWIDTH_BYTES, threads, BANDWIDTH_REPEATS)) / 1e9, 1),
    }


def describe_caches() -> dict[str, Any]:
    from foredraft.models.hub import hub_directory, models_directory, packed_directory

    caches = {"models": models_directory(), "hub": hub_directory(), "packed_weights": packed_directory()}
    report: dict[str, Any] = {
        name: {"path": str(path), "bytes": directory_bytes(path)} for name, path in caches.items()
    }
    report["packed_weights"]["files"] = [describe_packed(path) for path in sorted(packed_directory().glob("*.fdp"))]
    report["free_bytes"] = shutil.disk_usage(_existing_parent(caches["models"])).free
    return report


def describe_packed(path: Path) -> dict[str, Any]:
    """Whether repacked weights are as they were written: reads the whole file."""
    from foredraft.models.packed_cache import damaged_tensors

    damaged: Sequence[str] = []
    problem = None
    try:
        if damaged := damaged_tensors(path):
            problem = f"damaged: {', '.join(damaged[:3])}{f' and {len(damaged) - 3} more' if len(damaged) > 3 else ''}"
            problem += "; remove the file and they are made again"
    except ModelFileError as error:
        problem = str(error)
    except OSError as error:
        problem = f"cannot be read: {error.strerror}; remove the file and they are made again"
    return {"path": str(path), "problem": problem, "damaged_tensors": damaged}


def directory_bytes(path: Path) -> int:
    """Of all files below, as far as they can be read."""
    sizes = 0
    for folder, _, names in os.walk(path):
        for name in names:
            file = Path(folder, name)
            if not file.is_symlink() and file.exists():
                sizes += file.stat().st_size
    return sizes


def as_text(report: Mapping[str, Any]) -> str:
    installation, core, caches = report["installation"], report["core"], report["caches"]
    rows = [
        ("foredraft", f"{installation['foredraft']}, Python {installation['python']}"),
        ("machine", installation["machine"]),
    ]
    if core["kernel_set"] is None:
        rows.append(("core", "unusable"))
    else:
        rows += [
            ("kernels", f"{core['kernel_set']} (can run here: {', '.join(core['kernel_sets'])})"),
            ("threads", str(core["threads"])),
            ("memory", f"{core['read_gb_per_s']:.1f} GB/s read by {core['threads']} threads"),
        ]
    rows += [
        (label, f"{caches[name]['path']}, {format_bytes(caches[name]['bytes'])}")
        for label, name in (("models", "models"), ("from the hub", "hub"), ("packed weights", "packed_weights"))
    ]
    rows += [
        ("", f"{Path(file['path']).name}: sound" if file["problem"] is None else f"{file['path']}: {file['problem']}")
        for file in caches["packed_weights"]["files"]
    ]
    rows.append(("free disk", format_bytes(caches["free_bytes"])))
    for extra, missing in installation["missing_extras"].items():
        cure = f'pip install ".[{extra}]" in a clone of the repository'
        rows.append((f"extra {extra}", f"{', '.join(missing)} not installed: {cure}"))
    return "".join(f"{label:<16}{value}\n" for label, value in rows)


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or "unknown processor"


def _existing_parent(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path
