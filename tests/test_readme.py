"""What README shows works as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> Iterator[str]:
    yield from re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def examples() -> Iterator[tuple[str, str]]:
    """(language, source): Python blocks, and the shell lines that run foredraft."""
    yield from (("python", block) for block in blocks("python"))
    for block in blocks("bash"):
        yield from (("bash", line) for line in block.splitlines() if "foredraft" in line and "pip install" not in line)


def marked(example: tuple[str, str]) -> object:
    needs_pair = "qwen" in example[1]
    return pytest.param(*example, marks=pytest.mark.pair if needs_pair else pytest.mark.real, id=example[1][:60])


@pytest.mark.parametrize(("language", "source"), [marked(example) for example in examples()])
def test_example(language: str, source: str) -> None:
    if language == "python":
        command = [sys.executable, "-W", "error", "-c", source]
    else:
        shim = f'foredraft() {{ "{sys.executable}" -m foredraft "$@"; }}\nset -euo pipefail\n'
        command = ["bash", "-c", shim + source]
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_links_lead_somewhere() -> None:
    targets = re.findall(r"\]\(([^)#]+)\)", README)
    assert targets
    assert [target for target in targets if not target.startswith("http") and not (ROOT / target).exists()] == []


def test_the_two_commands_are_there() -> None:
    commands = [line for block in blocks("bash") for line in block.splitlines() if "pip install" in line]
    assert commands == ["pip install . && foredraft demo", 'pip install ".[test]" && pytest']
    assert README.count("python3 -m venv .venv && . .venv/bin/activate") == 2
