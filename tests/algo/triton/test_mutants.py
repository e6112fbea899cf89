"""Each fault that is put into a kernel by hand makes its test fail; without it the test passes, in its own module."""

from __future__ import annotations

from .mutants import MUTANTS, Mutant  # isort: skip  (before any kernel is defined)

from pathlib import Path

import pytest


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_is_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    mutant.apply(monkeypatch, tmp_path)
    with pytest.raises(AssertionError):
        mutant.caught_by()


def test_every_mutant_is_documented():
    page = (Path(__file__).parents[3] / "docs" / "losslessness.md").read_text(encoding="utf-8")
    listed = [line for line in page.splitlines() if line.startswith("| kernel: ")]
    assert listed == [mutant.listing for mutant in MUTANTS]
