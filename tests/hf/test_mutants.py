"""Faults put into the Transformers backend by hand, each with the test that must notice it (docs/transformers.md)."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from foredraft.hf import batch, columns, sampler
from foredraft.models.hf import cache, graphs, layout, masks, vision
from foredraft.models.hf.model import HFModel
from tests.algo.mutants import Mutant
from tests.hf import test_generate, test_generate_vision
from tests.models.hf import test_graphs, test_passes

MUTANTS = [
    Mutant(
        "a tree computed as a chain",
        layout,
        "make_layout",
        "chain if rows.parents is None else tree_mask(rows.parents)",
        "chain",
        partial(test_passes.test_a_tree_has_the_logits_of_its_chains, "llama"),
    ),
    Mutant(
        "positions are slots",
        layout,
        "make_layout",
        "written if rows.parents is None else np.add(rows.start, depths(rows.parents))",
        "written",
        partial(test_passes.test_a_tree_has_the_logits_of_its_chains, "gpt2"),
    ),
    Mutant(
        "the model's windows are forgotten",
        masks,
        "layout_mask",
        "allowed & layout.visible",
        "layout.visible",
        partial(test_passes.test_what_was_rejected_leaves_no_trace, "gemma3_text"),
    ),
    Mutant(
        "only the keys of an accepted path move",
        cache.SlotLayer,
        "move",
        "(self.keys, self.values)",
        "(self.keys,)",
        partial(test_passes.test_what_was_rejected_leaves_no_trace, "llama"),
    ),
    Mutant(
        "a broken text spoils its blocks",
        cache,
        "_store",
        "torch.nan_to_num(written)",
        "written",
        test_passes.test_a_sequence_that_broke_does_not_spoil_its_blocks,
    ),
    Mutant(
        "fillers are written to a text's block",
        layout,
        "make_layout",
        "= scratch * BLOCK_SIZE",
        "= 0",
        test_graphs.test_fillers_are_written_to_nobodys_block,
    ),
    Mutant(
        "shapes follow the draft",
        graphs,
        "fit",
        "batch) + num_queries",
        "batch) + longest",
        test_graphs.test_shapes,
    ),
    Mutant(
        "replays are not looked at",
        graphs,
        "_captured",
        "if not _is_close",
        "if False and _is_close",
        test_graphs.test_a_pass_that_does_something_else_each_time_is_not_captured,
    ),
    Mutant(
        "capturing forgets to be rehearsed",
        graphs,
        "_captured",
        "with _Rehearsal():",
        "if True:",
        test_graphs.test_a_model_that_reads_numbers_is_not_captured,
    ),
    Mutant(
        "the head runs over the wanted rows only",
        HFModel,
        "_run",
        "layout.num_queries == self.fixed_rows",
        "False",
        test_passes.test_rows_do_not_depend_on_how_many_are_filled_up,
    ),
    Mutant(
        "processors see the text before the block",
        sampler.ProcessorSampler,
        "_processed",
        "[*self._tokens, *path]",
        "self._tokens",
        partial(test_generate.test_arguments_of_generate, {"no_repeat_ngram_size": 2}),
    ),
    Mutant(
        "processors see no padding",
        batch.Batch,
        "_make_sequences",
        "self.input_ids[index].tolist()",
        "prompt",
        partial(test_generate.test_arguments_of_generate, {"min_length": 20, "eos_token_id": list(range(3, 60))}),
    ),
    Mutant(
        "criteria are asked after the block",
        columns.Columns,
        "_take",
        "~self._batch.stopping_criteria(self.ids, self.scores)",
        "~self._batch.stopping_criteria(self.ids, self.scores) | any(map(len, self._ahead))",
        test_generate.test_stop_strings,
    ),
    Mutant(
        "ended rows are not padded",
        columns.Columns,
        "is_padded",
        "self._pads_ends and not bool(self._is_unfinished[index])",
        "False",
        partial(test_generate.test_stopping_criteria_see_the_batch_token_by_token, 2),
    ),
    Mutant(
        "texts behind an image stand at their slots",
        vision,
        "spread_positions",
        "logical[behind] + shift",
        "logical[behind]",
        partial(test_generate_vision.test_greedy_ids_are_generates, "qwen2_vl", "two", "ngram"),
    ),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_the_named_test_notices(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant.caught_by()
    mutant.apply(monkeypatch)
    with pytest.raises(Exception):  # noqa: B017, PT011 (an assertion, or the engine refusing what no sequence may do)
        mutant.caught_by()


def test_the_page_lists_them() -> None:
    page = (Path(__file__).parents[2] / "docs" / "transformers.md").read_text(encoding="utf-8")
    listed = [line for line in page.splitlines() if line.startswith("| ") and "`test_" in line]
    assert listed == [mutant.listing for mutant in MUTANTS]
