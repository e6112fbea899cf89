"""Faults of the step loop, put in by hand: each makes a named test fail (docs/losslessness.md lists them)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import pytest

from foredraft.drafters.chains import ChainState
from foredraft.engine.scheduler import Scheduler
from foredraft.engine.sequence import Sequence
from foredraft.engine.step import Engine
from foredraft.kvcache.blocks import BlockPool, SlotTable
from tests.algo.mutants import Mutant
from tests.drafters import test_model
from tests.engine import test_batching, test_ending, test_lossless, test_pictures
from tests.engine.build import generator
from tests.kvcache import test_blocks


@cache
def plain() -> dict[int, list[tuple[int, ...]]]:
    greedy = test_lossless.GREEDY
    return {id(greedy): [test_lossless.ids(generator().generate(p, greedy))[0] for p in test_lossless.PROMPTS]}


def lossless(spec: str) -> Callable[[], None]:
    return partial(test_lossless.test_speculation_changes_nothing, plain(), spec, 3, test_lossless.GREEDY)


def stop_token() -> Callable[[], None]:
    whole = generator().generate(test_ending.PROMPT, test_ending.LONG)[0]
    origins = generator("model").generate(test_ending.PROMPT, test_ending.LONG)[0].origins
    inside = next(  # accepted, with another accepted token behind it in the same block
        i
        for i in range(1, 40)
        if origins[i] == origins[i + 1] == "model" and whole.token_ids.index(whole.token_ids[i]) == i
    )
    return partial(test_ending.test_stop_token_inside_a_block, whole, inside, "model")


MUTANTS = [
    Mutant("text goes on after its end", Sequence, "commit", "break", "pass", stop_token()),
    Mutant("rejected rows count as computed", Sequence, "commit", "count - 1", "len(draft.tokens)", lossless("model")),
    Mutant("tree path stays where it was", Engine, "_commit", "draft.parents is not None", "False", lossless("tree")),
    Mutant(
        "draft cache keeps rejected tokens",
        ChainState,
        "agree_with",
        "del self.cached[self.num_agreed :]",
        "pass",
        test_model.test_its_cache_follows_the_text_whatever_was_accepted,
    ),
    Mutant(
        "prefix of another text",
        SlotTable,
        "hashes",
        "self._hashes[-1] if self._hashes else _hash_salt(self.cache_salt)",
        "b''",
        test_blocks.test_a_block_is_known_by_all_tokens_before_it,
    ),
    Mutant(
        "prefix of another picture",
        SlotTable,
        "hashes",
        "picture.start < end and picture.end > begin",
        "False",
        test_pictures.test_equal_pictures_are_computed_once,
    ),
    Mutant(
        "prefix of another salt",
        SlotTable,
        "hashes",
        "self.cache_salt",
        "''",
        test_batching.test_salts_do_not_share_here_or_in_the_draft,
    ),
    Mutant(
        "the oldest gives way",
        Scheduler,
        "_preempt_last",
        "pop()",
        "pop(0)",
        test_batching.test_the_oldest_goes_on_when_the_youngest_give_way,
    ),
    Mutant(
        "draft in slots that are not there",
        Scheduler,
        "plan",
        "min((owned + more) * BLOCK_SIZE - len(seq.tokens), MAX_DRAFT)",
        "MAX_DRAFT",
        partial(test_batching.test_drafts_take_only_the_slots_that_texts_leave, "model"),
    ),
    Mutant(
        "kept blocks go roots first",
        BlockPool,
        "release",
        "reversed(blocks)",
        "blocks",
        partial(test_blocks.test_leaves_go_first, [0, 1]),
    ),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_the_named_test_notices(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant.caught_by()
    mutant.apply(monkeypatch)
    with pytest.raises(Exception):  # noqa: B017, PT011 (an assertion, or the tiny model refusing what no engine may do)
        mutant.caught_by()


def test_the_page_lists_them() -> None:
    page = (Path(__file__).parents[2] / "docs" / "losslessness.md").read_text(encoding="utf-8")
    listed = [line for line in page.splitlines() if line.startswith("| ") and "`test_" in line]
    assert listed[-len(MUTANTS) :] == [mutant.listing for mutant in MUTANTS]
