"""Drafts across tokenizers: what is proposed, from which law, and what the draft's cache makes of changed tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from foredraft.algo.sampler import make_sampler
from foredraft.drafters.cross_vocab import CrossVocab, CrossVocabDrafter
from foredraft.engine.generator import Generator
from foredraft.models.base import TextTokenizer
from foredraft.testing import ByteTokenizer, TinyModel
from foredraft.types import Draft, DraftRequest, SamplingParams, Verdict
from tests.drafters.translated import ToyTokenizer, Translated, byte_level, cross_drafter, sentencepiece
from tests.drafters.views import View
from tests.engine.build import VOCAB, draft_model, target
from tests.engine.test_lossless import GREEDY, PROMPTS, SEEDED, ids

GREEDY_ONE = SamplingParams(temperature=0)


def view(tokens: list[int], params: SamplingParams = GREEDY_ONE, id: int = 0, vocab: int = VOCAB) -> View:
    sampler = make_sampler(params, vocab_size=vocab, prompt=tokens, seed=1)
    return View(list(tokens), id=id, params=params, sampler=sampler, num_prompt_tokens=len(tokens))


def drafter(mode: CrossVocab, tokenizer: TextTokenizer | None = None) -> CrossVocabDrafter:
    return cross_drafter(mode, tokenizer or byte_level(), draft_model(), target())


def says(made: CrossVocabDrafter, *texts: str, tokenizer: Any) -> None:
    """Has the draft model say these pieces, whatever it reads."""
    rest = [tokenizer.pieces.index(text.encode()) for text in texts]

    def forward(batch: Any, hidden_layers: Any = ()) -> np.ndarray:
        wanted = sum(rows.num_logits for rows in batch)
        logits = np.zeros((wanted, made._chains.model.vocab_size), np.float32)
        for row in logits:
            row[rest.pop(0) if rest else 0] = 9.0
        return logits

    made._chains.model.forward = forward  # type: ignore[method-assign]


def toy_pair(mode: CrossVocab, target_pieces: list[str], draft_pieces: list[str]) -> tuple[CrossVocabDrafter, Any, Any]:
    ours, theirs = ToyTokenizer(*target_pieces), ToyTokenizer(*draft_pieces)
    model = TinyModel(ours.vocab_size, 64, 8)
    made = cross_drafter(mode, theirs, TinyModel(300, 64, 8), model, ours)
    return made, ours, theirs


def test_the_draft_s_text_comes_in_the_target_s_tokens() -> None:
    pieces = ["<s>", " ", "a", "b", "r", "q", "u", " quick", "brown"]
    made, ours, theirs = toy_pair("text", pieces, ["<x>", "a", "b", " ", " qu", "ick", " br", "own"])
    says(made, " qu", "ick", " br", "own", tokenizer=theirs)
    seq = view(ours.encode("a"), vocab=9)
    made.begin(seq)
    draft = made.propose([DraftRequest(seq, 6)])[0]
    assert [ours.token_bytes(t) for t in draft.tokens] == [b" quick", b" ", b"brown"]
    assert draft.probs is None


def test_a_draft_joins_the_committed_text_where_its_tokens_meet() -> None:
    made, ours, theirs = toy_pair("text", ["<s>", "wor", "ld", "world", "s"], ["<x>", "world", "ld", "s", "wor"])
    says(made, "ld", "s", tokenizer=theirs)
    seq = view(ours.encode("wor"), vocab=5)
    made.begin(seq)
    draft = made.propose([DraftRequest(seq, 2)])[0]
    assert [ours.token_bytes(t) for t in draft.tokens] == [b"ld", b"s"]  # not "world" once more


def test_half_a_character_waits_for_the_other_half() -> None:
    seq = view([*b"caf\xc3"])
    made = drafter("text")
    made.begin(seq)
    assert byte_level().decode(made._transcripts[0].ids) == ""
    draft = made.propose([DraftRequest(seq, 6)])[0]
    text = bytes(t for t in draft.tokens if t < 256)
    assert len(text) == len(draft.tokens) > 0
    read = b"".join(map(byte_level().token_bytes, made._transcripts[0].ids))
    assert read == b"caf\xc3"  # the draft read the half that is there


@pytest.mark.parametrize("mode", ["text", "tli"])
def test_control_tokens_never_cross(mode: CrossVocab) -> None:
    pieces = ["<s>", "a", "b", "<end>"]
    made, ours, theirs = toy_pair(mode, pieces, pieces[::-1])
    says(made, "a", "<end>", "b", tokenizer=theirs)
    seq = view([0, *ours.encode("ab"), 3, *ours.encode("b")], vocab=4)
    made.begin(seq)
    draft = made.propose([DraftRequest(seq, 3)])[0]
    assert draft.tokens == ([1] if mode == "text" else [1, 1, 2])  # it ends, or goes on with what is shared
    read = [theirs.token_bytes(t) for t in made._transcripts[0].ids]
    assert read == [b"<s>", b"a", b"b", b"<end>", b"b"]  # the draft reads those that it knows


def test_without_a_common_token_there_is_no_draft_by_law() -> None:
    made, ours, _ = toy_pair("tli", ["<s>", "a", "b"], ["<x>", "aa", "ab", "ba", "bb"])
    seq = view(ours.encode("ab") * 2, SamplingParams(temperature=1.0), vocab=3)
    made.begin(seq)
    assert not made.propose([DraftRequest(seq, 3)])[0].tokens


def test_auto_takes_the_text_when_greedy_and_the_law_where_most_is_shared() -> None:
    sampled = SamplingParams(temperature=0.9)
    for params, tokenizer, has_law in (
        (GREEDY_ONE, sentencepiece(), False),
        (sampled, sentencepiece(), True),
        (sampled, ToyTokenizer("<x>", "aa", "bb", "ab", "ba"), False),
    ):
        made, seq = drafter("auto", tokenizer), view([*b"abab"], params)
        made.begin(seq)
        assert (made.propose([DraftRequest(seq, 3)])[0].probs is not None) == has_law


def test_a_law_is_on_shared_tokens_alone_and_what_was_drawn_from() -> None:
    params = SamplingParams(temperature=0.9, top_k=5)
    made, seq = drafter("tli"), view([*b"the cat"], params)
    made.begin(seq)
    draft = made.propose([DraftRequest(seq, 4)])[0]
    assert draft.probs is not None
    assert draft.probs.shape == (4, VOCAB)
    for token, law in zip(draft.tokens, draft.probs, strict=True):
        assert law[token] > 0
        assert 1 < (law > 0).sum() <= 5
        assert law[256:].sum() == 0  # no control token, no padding
        assert abs(law.sum() - 1) < 1e-5


@pytest.mark.parametrize("mode", ["text", "tli"])
@pytest.mark.parametrize("tokenizer", [byte_level, sentencepiece], ids=["bpe", "spm"])
def test_its_cache_follows_the_text_whatever_was_accepted(mode: CrossVocab, tokenizer: Any) -> None:
    """Also where the tokens that it has read are cut otherwise later."""
    made, seq = drafter(mode, tokenizer()), view([*b"hello wor"])
    made.begin(seq)
    rng = np.random.default_rng(0)
    for num_accepted in (3, 0, 2, 1, 3, 3, 0, 2):
        draft = made.propose([DraftRequest(seq, 3)])[0]
        made.check_integrity()
        fresh, same = drafter(mode, tokenizer()), view(seq.tokens)
        fresh.begin(same)
        assert draft.tokens == fresh.propose([DraftRequest(same, 3)])[0].tokens
        accepted = draft.tokens[:num_accepted]
        new = [*accepted, int(rng.choice([*b"helo wrd"]))]
        seq.tokens += new
        seq.sampler.extend(new)
        made.observe(seq, draft, Verdict(range(len(accepted)), new[-1]), None)
    made.end(seq)
    made.check_integrity()


def test_a_law_s_confidences_and_a_text_s_are_learnt() -> None:
    for mode in ("text", "tli"):
        made, seq = drafter(mode), view([*b"the cat"])  # type: ignore[arg-type]
        made.begin(seq)
        before = made.propose([DraftRequest(seq, 3)])[0]
        assert before.confidences is not None
        assert len(before.confidences) == len(before.tokens) > 1
        for _ in range(12):
            made.observe(seq, replace(before, source=made.name), Verdict((), 5), None)
        after = made.propose([DraftRequest(seq, 3)])[0]
        assert after.confidences is not None
        assert after.confidences[0] < before.confidences[0]


def test_one_that_says_nothing_ends() -> None:
    made, ours, theirs = toy_pair("text", ["<s>", "a"], ["b", "a"])
    says(made, tokenizer=theirs)  # "b" for ever, which the target cannot spell
    seq = view(ours.encode("a"), vocab=2)
    made.begin(seq)
    assert made.propose([DraftRequest(seq, 3)])[0] == Draft([], confidences=[], source="text")


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("mode", ["text", "tli", "auto"])
@pytest.mark.parametrize("speaks", ["bpe", "spm"])
def test_a_target_of_any_tokenizer(speaks: str, mode: CrossVocab, params: SamplingParams) -> None:
    """The draft speaks bytes; the target does not."""
    tokenizer = byte_level() if speaks == "bpe" else sentencepiece()
    inner = TinyModel(VOCAB, 512, 160, kinship=4.0)
    model = Translated(inner, tokenizer)
    small = cross_drafter(mode, ByteTokenizer(), draft_model(), model, tokenizer)
    plain = Generator(model, tokenizer, native=False)
    drafting = Generator(model, tokenizer, [small], native=False, adaptive=False, num_speculative_tokens=5)
    expected = ids(plain.generate(PROMPTS, params))
    outs = drafting.generate(PROMPTS, params)
    assert ids(outs) == expected
    assert sum(out.speculation.num_accepted_tokens for out in outs) > 20
    small.check_integrity()


def test_streamed_text_is_the_text() -> None:
    small = cross_drafter("auto", byte_level(), draft_model(), target())
    gen = Generator(target(), ByteTokenizer(), [small], native=False, adaptive=False)
    plain = Generator(target(), ByteTokenizer(), native=False).generate(PROMPTS[0], GREEDY)[0]
    assert "".join(chunk.text for chunk in gen.stream(PROMPTS[0], GREEDY)) == plain.text
