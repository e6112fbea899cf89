"""Faults put into the code by hand, each with the test that must notice it (docs/losslessness.md lists them)."""

from __future__ import annotations

import inspect
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from foredraft.algo import filters, masks, noise, sampler, tree, verify

from . import (
    test_filters,
    test_grammar_exact,
    test_masks,
    test_noise,
    test_sampler,
    test_sampler_exact,
    test_tree,
    test_verify,
)


@dataclass(frozen=True)
class Mutant:
    """`function` of `owner` with `old` replaced by `new` in its source."""

    name: str
    owner: Any
    function: str
    old: str
    new: str
    caught_by: Callable[[], None]

    @property
    def listing(self) -> str:
        """Its line in docs/losslessness.md."""
        test = self.caught_by.func if isinstance(self.caught_by, partial) else self.caught_by
        owner = self.owner.__name__.rpartition(".")[2]
        module = test.__module__.rpartition(".")[2]
        return f"| {self.name} | `{owner}.{self.function}` | `{module}.{test.__name__}` |"

    def apply(self, patch: pytest.MonkeyPatch) -> None:
        original = inspect.getattr_static(self.owner, self.function)
        source = textwrap.dedent(inspect.getsource(original))
        assert source.count(self.old) == 1, f"{self.name}: {self.old!r} occurs {source.count(self.old)} times"
        module = inspect.getmodule(original)
        scope: dict[str, Any] = {}
        code = "from __future__ import annotations\n" + source.replace(self.old, self.new)
        exec(compile(code, f"<{self.name}>", "exec"), vars(module), scope)
        patch.setattr(self.owner, self.function, scope[self.function])
        for name, importer in list(sys.modules.items()):  # who imported the function by name
            if name.startswith(("foredraft.", "tests.")) and vars(importer).get(self.function) is original:
                patch.setattr(importer, self.function, scope[self.function])


ARRAY = sampler.ArraySampler

MUTANTS = [
    # The law that the draft is tested against is not the one it was drawn from.
    Mutant(
        "q before the filters",
        ARRAY,
        "draw",
        "rounded = _to_double(probs)",
        "rounded = law; probs[:] = filters.softmax(_to_double(logits) / self._params.temperature)",
        test_sampler_exact.test_draft_law_is_the_filtered_one,
    ),
    Mutant(
        "q rounded after the draw",
        ARRAY,
        "draw",
        "rounded = _to_double(probs)",
        "rounded = law",
        test_sampler_exact.test_draft_laws_rounded_to_few_bits,
    ),
    # Noise.
    Mutant(
        "residual shares the draft's noise",
        ARRAY,
        "_test",
        "Stream.RESIDUAL",
        "Stream.DRAFT",
        test_sampler_exact.test_three_tokens_with_separate_streams,
    ),
    Mutant(
        "test shares the draft's noise",
        ARRAY,
        "_test",
        "uniform(self._key(Stream.ACCEPT, p.depths[i]), i)",
        "uniform(self._key(Stream.DRAFT, p.depths[i]))",
        test_sampler_exact.test_three_tokens_with_separate_streams,
    ),
    Mutant(
        "block noise keyed by position alone",
        ARRAY,
        "_key",
        "self._num_passes",
        "0",
        test_sampler_exact.test_block_with_unequal_laws_over_several_passes,
    ),
    Mutant(
        "target noise keyed by the pass",
        ARRAY,
        "_sample_target",
        "self._choice)",
        "self._choice, self._num_passes)",
        test_sampler.test_same_seed_same_text_with_any_draft,
    ),
    Mutant(
        "position counted in the block",
        ARRAY,
        "_sample_target",
        "len(self._tokens) + depth",
        "len(self._tokens)",
        test_sampler.test_same_seed_same_text_with_any_draft,
    ),
    Mutant("round of Philox missing", noise, "philox", "range(10)", "range(9)", test_noise.test_philox_known_answers),
    # Strictness at zero.
    Mutant(
        "ratio test with <=",
        verify,
        "ratio_test",
        "< float(law[token])",
        "<= float(law[token])",
        test_verify.test_impossible_tokens_never_pass_even_at_uniform_zero,
    ),
    Mutant(
        "block test with <=",
        verify,
        "block_test",
        "uniforms[i] < threshold",
        "uniforms[i] <= threshold",
        test_verify.test_impossible_tokens_never_pass_even_at_uniform_zero,
    ),
    Mutant(
        "draw of an impossible token",
        verify,
        "draw_from",
        "sums <= u",
        "sums < u",
        test_verify.test_drawing_skips_impossible_tokens,
    ),
    Mutant(
        "residual without mass",
        verify,
        "excess",
        "if mass > 0 else p",
        "if mass > 0 else rest",
        test_verify.test_excess_without_mass_is_the_target,
    ),
    # The ratio test.
    Mutant(
        "correction from p instead of the residual",
        verify,
        "ratio_test",
        "law = excess(law, q[child])",
        "pass",
        test_verify.test_ratio_test_is_lossless,
    ),
    Mutant(
        "second child tested against p",
        verify,
        "ratio_test",
        "law = excess(law, q[child])",
        "law = excess(p[row], q[child])",
        test_verify.test_sampled_children_are_lossless,
    ),
    Mutant(
        "row of the wrong node",
        verify,
        "ratio_test",
        "law = p[row]",
        "law = p[len(accepted)]",
        test_verify.test_two_level_tree_of_sampled_children_is_lossless,
    ),
    # Block verification.
    Mutant(
        "block stops at the first failure",
        verify,
        "block_test",
        "num_accepted, weights = i + 1, rest",
        "num_accepted, weights = i + 1, rest\n        else:\n            break",
        test_verify.test_block_test_is_lossless,
    ),
    Mutant(
        "rho not capped at 1",
        verify,
        "_next_rho",
        "min(1.0, rho * (p / q))",
        "rho * (p / q)",
        test_verify.test_block_test_is_lossless,
    ),
    Mutant(
        "rho forgets the prefix",
        verify,
        "_next_rho",
        "min(1.0, rho * (p / q))",
        "min(1.0, p / q)",
        test_verify.test_block_test_is_lossless,
    ),
    Mutant(
        "residual of the token, not of the block",
        verify,
        "block_test",
        "rest = surplus if mass > 0 else p[i + 1]",
        "rest = excess(p[i + 1], q[i + 1])",
        test_verify.test_block_test_is_lossless,
    ),
    Mutant(
        "threshold without 1 - rho",
        verify,
        "block_test",
        "left = mass + 1.0 - rho",
        "left = mass",
        test_verify.test_block_test_is_lossless,
    ),
    Mutant(
        "block verification that is the ratio test",
        ARRAY,
        "_test",
        'self._method == "block" and',
        "False and",
        test_sampler_exact.test_block_accepts_what_theory_says,
    ),
    # State of the block.
    Mutant(
        "processors from before the block",
        sampler._ProcessedRows,
        "_scores",
        "path = [self._tokens[i] for i in path_to(self._parents, row - 1)]",
        "path = []",
        test_sampler_exact.test_processors_apply_at_each_position_of_the_block,
    ),
    Mutant(
        "draft without its own path",
        ARRAY,
        "draw",
        "self._process(self._fit(_to_double(logits)), path, mask)",
        "self._process(self._fit(_to_double(logits)), [], mask)",
        test_sampler_exact.test_self_draft_is_always_accepted,
    ),
    Mutant(
        "penalties of a chain in a tree",
        sampler._ProcessedRows,
        "_scores",
        "path = [self._tokens[i] for i in path_to(self._parents, row - 1)]",
        "path = self._tokens[:row]",
        test_sampler_exact.test_two_level_tree_with_penalties_samples_each_node_from_its_own_law,
    ),
    Mutant(
        "min_tokens counts passes",
        ARRAY,
        "_reweigh",
        "len(output) < params.min_tokens",
        "self._num_passes < params.min_tokens",
        test_sampler_exact.test_min_tokens_counts_tokens_and_not_passes,
    ),
    Mutant(
        "padded vocabularies refused",
        ARRAY,
        "_fit",
        "if width >= self._vocab_size:",
        "assert width == self._vocab_size\n    if True:",
        test_sampler_exact.test_vocabularies_of_different_width,
    ),
    # Trees.
    Mutant(
        "walk that stops where the first child differs",
        verify,
        "sample_and_walk",
        "(child for child in children[row] if tokens[child] == token)",
        "(child for child in children[row][:1] if tokens[child] == token)",
        test_verify.test_walk_over_any_tree_is_lossless,
    ),
    Mutant(
        "root as the last row of the mask",
        tree,
        "tree_mask",
        "if parent >= 0:",
        "if True:",
        test_tree.test_mask_shows_ancestors_only,
    ),
    # Grammars.
    Mutant(
        "drawn token dropped because it is not allowed",
        masks,
        "cut_draft",
        "if allowed or draft.probs is not None",
        "if allowed",
        partial(test_masks.test_a_drawn_token_stays_and_ends_the_draft, (2, 0), (2,)),
    ),
    Mutant(
        "fixed token kept although it is not allowed",
        masks,
        "cut_draft",
        "if allowed or draft.probs is not None",
        "if True",
        test_masks.test_a_tree_loses_what_is_not_allowed_and_what_hangs_on_it,
    ),
    Mutant(
        "mask from before the block",
        masks,
        "masks_along",
        "masks[1 + node] = grammar.mask(path)",
        "masks[1 + node] = root",
        partial(test_grammar_exact.test_drawn_chains, "block", True),
    ),
    Mutant(
        "draft goes on behind the end",
        masks,
        "cut_draft",
        "and not grammar.is_complete([*path, token])",
        "",
        partial(test_masks.test_a_chain_ends_before_the_first_token_that_is_not_allowed, (1, 2, 0, 0), (1, 2)),
    ),
    Mutant(
        "mask of a chain in a tree",
        masks,
        "_tokens_to",
        "path_to(parents, node)",
        "range(node + 1)",
        test_masks.test_each_row_has_the_mask_of_its_own_place,
    ),
    # Filters.
    Mutant(
        "top-p without the token that reaches it",
        filters,
        "apply_top_p",
        "before < top_p",
        "before + weights < top_p",
        test_filters.test_top_p_keeps_the_fewest_that_reach_it,
    ),
    Mutant(
        "ties at the edge of top-k",
        filters,
        "apply_top_k",
        "_ranks(logits) < k",
        "logits >= xp.sort(logits)[-k]",
        test_filters.test_ties_keep_the_lowest_ids,
    ),
    Mutant(
        "min-p before the temperature",
        ARRAY,
        "_process",
        "logits = filters.apply_temperature(logits, params.temperature)",
        "logits = filters.apply_temperature(filters.apply_min_p(logits, params.min_p), params.temperature)",
        test_sampler.test_order_of_processing,
    ),
    Mutant(
        "repetition penalty that rewards unlikely tokens",
        filters,
        "apply_penalties",
        "logits * repetition",
        "logits / repetition",
        test_filters.test_penalties,
    ),
    # Logprobs.
    Mutant(
        "logprobs after processing",
        ARRAY,
        "logprobs",
        "filters.log_softmax(_to_double(logits))",
        "filters.log_softmax(self.scores(logits, []))",
        partial(test_sampler.test_logprobs_are_of_the_raw_logits, test_sampler.array_sampler),
    ),
]
