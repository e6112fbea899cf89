"""Each fault that is put in by hand makes its test fail, so the tests can see what they guard against."""

from __future__ import annotations

from pathlib import Path

import pytest

from .mutants import MUTANTS, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_is_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch):
    mutant.caught_by()
    mutant.apply(monkeypatch)
    with pytest.raises(AssertionError):
        mutant.caught_by()


def test_every_mutant_is_documented():
    page = (Path(__file__).parents[2] / "docs" / "losslessness.md").read_text(encoding="utf-8")
    listed = [line for line in page.splitlines() if line.startswith("| ") and "`test_" in line]
    assert listed[: len(MUTANTS)] == [mutant.listing for mutant in MUTANTS]
