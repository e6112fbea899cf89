"""A room imports only from rooms above it, and torch and Triton stay out of all that runs without them."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "foredraft"

#: From top to bottom. Modules of the first row are single files and may import each other.
ROOMS = ["algo", "models", "kvcache", "drafters", "engine", "hf", "server", "train", "bench", "cli"]
MESSAGES = {"types", "errors", "config", "_native"}
#: Doubles for tests: may import every room, and no room may import them.
TESTING = "testing"
#: Where optional packages may be imported.
OPTIONAL = {"torch": {"hf", "train", "triton"}, "transformers": {"hf", "train"}, "triton": {"triton"}}


def imported_modules(source: str, package: str) -> Iterator[str]:
    """Absolute dotted names of all imports, wherever they stand in the file."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def forbidden_imports(path: Path, source: str) -> list[str]:
    room = room_of(path)
    places = {*path.relative_to(SOURCE).parts, path.stem}
    package = ".".join(["foredraft", *path.relative_to(SOURCE).parent.parts])
    found = []
    for name in imported_modules(source, package):
        parts = name.split(".")
        if parts[0] in OPTIONAL and OPTIONAL[parts[0]].isdisjoint(places):
            found.append(name)
        if parts[0] != "foredraft" or len(parts) == 1 or room in ("__init__", "__main__", TESTING):
            continue
        other = parts[1]
        is_above = other == room or other in MESSAGES
        if room in ROOMS and other in ROOMS:
            is_above = ROOMS.index(other) <= ROOMS.index(room)
        is_submodule = (SOURCE / other).is_dir() or (SOURCE / f"{other}.py").exists() or other == "_native"
        if is_submodule and not is_above:
            found.append(name)
    return found


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_upwards(path: Path) -> None:
    assert forbidden_imports(path, path.read_text()) == []


def test_every_room_has_its_place() -> None:
    folders = {path.name for path in SOURCE.iterdir() if (path / "__init__.py").exists()}
    assert folders - {TESTING} <= set(ROOMS)


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("algo/verify.py", "from foredraft.models.base import Rows"),
        ("algo/verify.py", "def f():\n    from foredraft import engine"),
        ("models/base.py", "from ..drafters import base"),
        ("engine/step.py", "import foredraft.testing.model"),
        ("types.py", "from foredraft.algo import sampler"),
        ("engine/step.py", "import torch.nn"),
        ("models/native.py", "from transformers import AutoModel"),
        ("models/hf/load.py", "import triton"),
        ("algo/triton/laws.py", "import transformers"),
        ("algo/triton/laws.py", "from foredraft.models.base import Rows"),
    ],
)
def test_a_wrong_import_is_found(file: str, source: str) -> None:
    assert forbidden_imports(SOURCE / file, source)


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("models/hf.py", "import torch"),
        ("algo/triton/laws.py", "import torch, triton"),
        ("cli/main.py", "from foredraft.engine.llm import LLM"),
        ("models/base.py", "from foredraft.types import Array"),
    ],
)
def test_a_right_import_passes(file: str, source: str) -> None:
    assert forbidden_imports(SOURCE / file, source) == []
