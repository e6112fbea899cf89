"""Faults that people met in other engines, put in by hand: each makes a test fail (docs/known_faults.md lists them)."""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

import foredraft.hf
from foredraft.drafters.chains import LawChain
from foredraft.engine.controller import Controller
from foredraft.engine.detokenize import Detokenizer
from foredraft.engine.grammar import Grammar
from foredraft.engine.sequence import Sequence
from foredraft.engine.stats import RequestStats
from foredraft.engine.step import Engine
from foredraft.hf import batch as hf_batch
from foredraft.models import native, tokenizer
from foredraft.server.tool_calls import ToolCallReader

from .algo import mutants as algo_mutants
from .algo import test_sampler
from .algo.mutants import Mutant
from .engine import test_controller, test_ending, test_grammar, test_lossless, test_stats
from .engine import test_mutants as engine_mutants
from .engine.build import generator
from .hf import test_caches, test_server_images
from .models import test_native, test_tokenizer
from .server import test_tool_calls

NAMED = {mutant.name: mutant for mutant in (*algo_mutants.MUTANTS, *engine_mutants.MUTANTS)}
PLAIN = generator().generate(test_ending.PROMPT, test_ending.LONG)[0]
TOOL_CALL = test_tool_calls.tagged("weather", test_tool_calls.ROME) + " Done."
array = test_sampler.array_sampler
#: The module: its package has a function of that name.
hf_generate = sys.modules[f"{foredraft.hf.__name__}.generate"]


@dataclass(frozen=True)
class Fault:
    """What people reported, ways to put it in, and those of them that a page of mutants already has."""

    report: str
    new: tuple[Mutant, ...] = ()
    named: tuple[str, ...] = ()

    @property
    def mutants(self) -> list[Mutant]:
        return [NAMED[name] for name in self.named] + list(self.new)


FAULTS = [
    Fault(
        "greedy text differs from plain decoding",
        (
            Mutant(
                "a tree computed as a chain",
                native,
                "_flatten_parents",
                "all(rows.parents is None for rows in batch)",
                "True",
                partial(test_native.test_tree_logits_equal_the_plain_reference, "gemma3"),
            ),
        ),
        named=("rejected rows count as computed", "tree path stays where it was"),
    ),
    Fault("sampling accepts tokens that the target gives no chance", named=("ratio test with <=",)),
    Fault("q is not the law that the draft was drawn from", named=("q before the filters",)),
    Fault(
        "a tree is tested with the wrong logits, or without its penalties",
        named=("row of the wrong node", "penalties of a chain in a tree"),
    ),
    Fault("block verification is coded token by token", named=("block verification that is the ratio test",)),
    Fault(
        "penalties weakened by the length of a block; min_tokens counts passes",
        (
            Mutant(
                "penalties forget the accepted block",
                algo_mutants.ARRAY,
                "extend",
                "int(token) for token in tokens)",
                "int(token) for token in tokens[-1:])",
                partial(test_sampler.test_frequency_penalty_counts_every_token_of_an_accepted_block, array),
            ),
        ),
        named=("min_tokens counts passes",),
    ),
    Fault(
        "a grammar crashes or is broken by drafts: illegal tokens, an end in mid-block, a matcher that has terminated",
        (
            Mutant(
                "a rejected token stays in the matcher",
                Grammar,
                "_go",
                "self._matcher.rollback(len(self._ahead) - shared)",
                "pass",
                test_grammar.test_paths_in_any_order_leave_no_trace,
            ),
            Mutant(
                "the text goes on behind the end of its grammar",
                Sequence,
                "_reason_to_stop",
                "self.grammar.advance(token)",
                "self.grammar.advance(token) and False",
                test_grammar.test_a_block_that_runs_past_the_end_of_the_grammar,
            ),
            Mutant(
                "the draft model knows no grammar",
                LawChain,
                "draw",
                "probs, mask)",
                "probs)",
                test_grammar.test_a_draft_model_under_the_grammar_is_accepted_often,
            ),
        ),
        named=(
            "drawn token dropped because it is not allowed",
            "fixed token kept although it is not allowed",
            "draft goes on behind the end",
            "mask from before the block",
        ),
    ),
    Fault(
        "logprobs missing, or of another position, under speculation",
        (
            Mutant(
                "logprobs of the block's first row",
                Engine,
                "_commit",
                "logits[node]",
                "logits[0]",
                partial(test_lossless.test_logprobs_are_plain_decoding_s, "tree", test_lossless.GREEDY),
            ),
        ),
        named=("logprobs after processing",),
    ),
    Fault(
        "text leaks behind an end-of-text token, a stop string or a limit; wrong finish_reason",
        (
            Mutant(
                "limit noticed after the block",
                Sequence,
                "_reason_to_stop",
                "self.num_remaining <= 0",
                "self.num_remaining < 0",
                partial(test_ending.test_max_tokens_inside_a_block, PLAIN, 5),
            ),
            Mutant(
                "stop string noticed but not cut",
                Detokenizer,
                "_cut_at_stop",
                "self._text = self._text[: min(found)]",
                "pass",
                partial(test_ending.test_stop_strings_end_the_text_before_them, "model"),
            ),
        ),
        named=("text goes on after its end",),
    ),
    Fault(
        "a kind of cache, a long prompt or left padding is refused, or gets a wrong answer",
        (
            Mutant(
                "padding is read, and the end of the prompt is not",
                hf_batch,
                "make_batch",
                "row[pads:].tolist()",
                "row[: padded - pads].tolist()",
                partial(test_caches.test_long_prompts_with_padding, "llama", "ngram"),
            ),
            Mutant(
                "no kind of cache but the usual one",
                hf_generate,
                "_without_cache",
                'kind == "quantized"',
                "kind is not None",
                partial(test_caches.test_kinds_of_cache, "llama", "argument"),
            ),
        ),
    ),
    Fault(
        "the same tokenizer with a padded vocabulary is refused",
        (
            Mutant(
                "padding counts as a difference",
                tokenizer,
                "same_tokenizer",
                "ours != theirs and ours and theirs",
                "ours != theirs",
                test_tokenizer.test_same_tokenizer_ignores_padding_templates_and_settings,
            ),
        ),
        named=("padded vocabularies refused",),
    ),
    Fault(
        "more than one sequence is not supported, or changes the text",
        (
            Mutant(
                "logits of the batch's first sequence",
                Engine,
                "_split",
                "logits[first : first + r.num_logits]",
                "logits[: r.num_logits]",
                partial(test_lossless.test_eight_unequal_prompts_are_eight_single_runs, "ngram+model"),
            ),
        ),
    ),
    Fault(
        "slower than plain decoding, and nobody is told",
        (
            Mutant(
                "a draft that does not pay goes on",
                Controller,
                "requests",
                "best_lengths(chances, price.pass_s, price.tokens, row_s, draft_s)",
                "[len(c) for c in chances]",
                test_controller.test_a_useless_drafter_is_off_within_64_tokens_and_says_so,
            ),
            Mutant(
                "off without a word",
                Controller,
                "_switch_off",
                "if record.has_told or (",
                "if True or (",
                test_controller.test_a_useless_drafter_is_off_within_64_tokens_and_says_so,
            ),
        ),
    ),
    Fault(
        "a wrong draft model shows as nothing but low acceptance",
        (
            Mutant(
                "acceptance is not judged",
                Controller,
                "observe_verdict",
                "self._check_acceptance(drafter, num_accepted)",
                "pass",
                test_controller.test_a_draft_that_was_not_made_for_the_target_is_named,
            ),
        ),
    ),
    Fault(
        "acceptance figures that mean something else in every tool",
        (
            Mutant(
                "the bonus token counts as accepted",
                RequestStats,
                "speculation",
                "1 + self.num_accepted_tokens / self.num_drafts",
                "1 + self.num_accepted_tokens / self.num_passes",
                test_stats.test_a_trace_by_hand,
            ),
        ),
    ),
    Fault(
        "an image request kills the server",
        (
            Mutant(
                "an image that cannot be read breaks the pass",
                Engine,
                "_look",
                "except ForedraftError as error:",
                "except KeyError as error:",
                test_server_images.test_after_images_the_server_goes_on,
            ),
        ),
    ),
    Fault(
        "base and instruct versions are taken for different tokenizers",
        (
            Mutant(
                "chat templates are compared",
                tokenizer,
                "same_tokenizer",
                "target.is_same_vocabulary(draft)",
                "target.chat_template != draft.chat_template:\n        return 'template'\n    elif False",
                test_tokenizer.test_same_tokenizer_ignores_padding_templates_and_settings,
            ),
        ),
    ),
    Fault(
        "the streamed text is not the text",
        (
            Mutant(
                "nothing is held back",
                Detokenizer,
                "take",
                "0 if final else self._num_held()",
                "0",
                partial(test_ending.test_stop_strings_end_the_text_before_them, "none"),
            ),
        ),
    ),
    Fault(
        "deltas of several tokens break the parsing of tool calls",
        (
            Mutant(
                "a tag is sought in each piece alone",
                ToolCallReader,
                "_read_text",
                "len(before) - num_held(before, OPEN)",
                "len(before)",
                partial(test_tool_calls.test_whole_by_letters_and_in_random_pieces, TOOL_CALL),
            ),
            Mutant(
                "what follows a call in the same piece is lost",
                ToolCallReader,
                "_read_arguments",
                "self._buffer[: self._object.end], self._buffer[self._object.end :]",
                "self._buffer[: self._object.end], ''",
                partial(test_tool_calls.test_whole_by_letters_and_in_random_pieces, TOOL_CALL),
            ),
        ),
    ),
]
NEW = [mutant for fault in FAULTS for mutant in fault.new]


@pytest.mark.parametrize("mutant", NEW, ids=lambda mutant: mutant.name)
def test_the_named_test_notices(
    mutant: Mutant, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FOREDRAFT_HOME", str(tmp_path / "home"))
    fixtures = {name: request.getfixturevalue(name) for name in inspect.signature(mutant.caught_by).parameters}
    mutant.caught_by(**fixtures)
    if "caplog" in fixtures:
        fixtures["caplog"].clear()
    mutant.apply(monkeypatch)
    with pytest.raises(Exception):  # noqa: B017, PT011 (an assertion, or the tiny model refusing what no engine may do)
        mutant.caught_by(**fixtures)


def test_the_page_lists_them() -> None:
    page = (Path(__file__).parents[1] / "docs" / "known_faults.md").read_text(encoding="utf-8")
    listed = [line for line in page.splitlines() if "`test_" in line]
    assert listed == [f"| {fault.report} {mutant.listing}" for fault in FAULTS for mutant in fault.mutants]
