"""Faults put into the kernels by hand, each with the test that must notice it (docs/losslessness.md lists them)."""

from __future__ import annotations

from . import test_laws, test_noise, test_verdicts  # isort: skip  (before any kernel is defined)

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest

from foredraft.algo.triton import laws, noise, verdicts

from .test_laws import laws_agree, noise_agrees
from .test_verdicts import test_chains_are_lossless as chains_are_lossless


@dataclass(frozen=True)
class Mutant:
    """A module's source with `old` replaced by `new`; its public functions take the places of the module's own."""

    name: str
    module: ModuleType
    old: str
    new: str
    caught_by: Callable[..., None]

    @property
    def listing(self) -> str:
        """Its line in docs/losslessness.md."""
        test = self.caught_by.func if isinstance(self.caught_by, partial) else self.caught_by
        places = [module.__name__.rpartition(".")[2] for module in (self.module, sys.modules[test.__module__])]
        return f"| {self.name} | `triton/{places[0]}` | `triton/{places[1]}.{test.__name__}` |"

    def apply(self, patch: pytest.MonkeyPatch, folder: Path) -> None:
        source = Path(str(self.module.__file__)).read_text(encoding="utf-8")
        assert source.count(self.old) == 1, f"{self.name}: {self.old!r} occurs {source.count(self.old)} times"
        path = folder / "mutant.py"
        path.write_text(source.replace(self.old, self.new), encoding="utf-8")
        spec = importlib.util.spec_from_file_location("mutant", path)
        assert spec is not None
        assert spec.loader is not None
        mutated = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, "mutant", mutated)  # dataclasses look their module up
        spec.loader.exec_module(mutated)
        for function in ("draw_uniforms", "find_best", "make_laws", "race", "walk", "judge_chains"):
            if function in vars(mutated):
                patch.setattr(self.module, function, vars(mutated)[function])


MUTANTS = [
    Mutant(
        "kernel: correction from p instead of the residual",
        verdicts,
        "return tl.maximum(p - q, 0.0)",
        "return p",
        partial(chains_are_lossless, "three tokens", False),
    ),
    Mutant(
        "kernel: residual of the token, not of the block",
        verdicts,
        "p_scale = tl.where(has_mass, tl.load(tests.rho + row) * tl.load(tests.p_scale + row), 1.0)",
        "p_scale = tl.where(has_mass, tl.load(tests.p_scale + row), 1.0)",
        partial(chains_are_lossless, "laws that change", True),
    ),
    Mutant(
        "kernel: rho forgets the prefix",
        verdicts,
        "tl.minimum(rho * (p",
        "tl.minimum((p",
        partial(chains_are_lossless, "two in a row", True),
    ),
    Mutant(
        "kernel: block stops at the first failure",
        verdicts,
        "tl.where(u < threshold, i + 1, num_accepted)",
        "tl.where((u < threshold) & (num_accepted == i), i + 1, num_accepted)",
        partial(chains_are_lossless, "two in a row", True),
    ),
    Mutant(
        "kernel: threshold without 1 - rho",
        verdicts,
        "left = mass + 1.0 - tl.load(tests.rho + row + 1)",
        "left = mass",
        partial(chains_are_lossless, "two in a row", True),
    ),
    Mutant(
        "kernel: ratio test goes on after a failure",
        verdicts,
        "passes & (num_accepted == i)",
        "passes",
        partial(chains_are_lossless, "two in a row", False),
    ),
    Mutant(
        "kernel: ratio test with <=",
        verdicts,
        "passes = u * tl.load(tests.q + row) < ",
        "passes = u * tl.load(tests.q + row) <= ",
        test_verdicts.test_nothing_impossible_passes_and_nothing_is_left_over,
    ),
    Mutant(
        "kernel: walk steps to any node behind",
        verdicts,
        "(parents == node) & (tokens == sample)",
        "(nodes > node) & (tokens == sample)",
        test_verdicts.test_walks_are_the_references,
    ),
    Mutant(
        "kernel: ties at the edge of top-k",
        laws,
        "(before < goal)",
        "(before <= goal)",
        partial(laws_agree, 21, [test_laws.FILTERS[3]]),
    ),
    Mutant(
        "kernel: top-p without the token that reaches it",
        laws,
        "(before < goal)",
        "(before + size < goal)",
        partial(laws_agree, 21, [test_laws.FILTERS[4]]),
    ),
    Mutant(
        "kernel: words of other tokens",
        laws,
        "_speed(weights, id0 + 16, word1, vocab)",
        "_speed(weights, id0 + 16, word2, vocab)",
        partial(noise_agrees, 50, 20),
    ),
    Mutant(
        "kernel: NaN hidden by the maximum",
        laws,
        'tl.where(x == x, x, float("inf"))',
        'tl.where(x == x, x, float("-inf"))',
        test_laws.test_what_is_not_finite_shows,
    ),
    Mutant(
        "kernel: uniforms of fewer bits",
        noise,
        "low >> 6",
        "low >> 7",
        test_noise.test_uniforms_are_the_references,
    ),
]
