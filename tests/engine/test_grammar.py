"""Grammars under speculation: legal text, the same text as without, and a defined end whatever happens."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from foredraft.algo.masks import cut_draft, is_allowed, masks_along, unpack_mask
from foredraft.engine.generator import Generator
from foredraft.engine.grammar import Grammar, GrammarCompiler
from foredraft.errors import GrammarError
from foredraft.testing import ByteTokenizer
from foredraft.types import (
    Array,
    Completion,
    Draft,
    DraftRequest,
    SamplingParams,
    SequenceView,
    StructuredOutputs,
    Verdict,
)
from tests.engine.build import VOCAB, DraftNeeds, drafters, generator, target

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "pattern": "^[a-z]{1,12}$"},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 1, "maxItems": 6},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    }
)
PERSON = StructuredOutputs(json_schema=SCHEMA)
LIST = StructuredOutputs(grammar='start: "[" item ("," item)* "]"\nitem: /[0-9]{1,3}/ | start')
WORDS = StructuredOutputs(regex="(cat|cow|dog)( (cat|cow|dog)){2,40}!?")
PROMPTS = ['{"name":"bob","age":1,"tags":["red","red"]}' * 2, "cat cow dog cat cow dog cat"]
MAX_TOKENS = 48
END = min(ByteTokenizer().eos_ids)


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(ByteTokenizer(), VOCAB)


def compiled(wanted: StructuredOutputs) -> Grammar:
    return compiler().compile(wanted)


def allowed(grammar: Grammar, text: str) -> str:
    """The characters that may follow; $ is the end."""
    tokens = np.flatnonzero(unpack_mask(grammar.mask(text.encode()), VOCAB))
    return "".join(sorted({"$" if t in ByteTokenizer().eos_ids else chr(t) for t in tokens}))


# ── a grammar by itself ──────────────────────────────────────────────────────────────────────────────────────────────


def test_masks_tell_what_may_follow_and_where_the_text_may_end() -> None:
    grammar = compiled(StructuredOutputs(regex="ab?|cd"))
    assert allowed(grammar, "") == "ac"
    assert allowed(grammar, "a") == "$b"
    assert allowed(grammar, "c") == "d"
    assert not grammar.is_complete(b"a")
    assert grammar.is_complete(b"ab")
    assert grammar.is_complete(b"cd")
    assert grammar.is_complete([ord("a"), END])
    assert not grammar.advance(ord("a"))
    assert allowed(grammar, "") == "$b"
    assert grammar.advance(END)


@pytest.mark.parametrize("width", [263, 264, 287, 288, 289, 320])
def test_masks_have_the_width_of_the_logits(width: int) -> None:
    mask = GrammarCompiler(ByteTokenizer(), width).compile(StructuredOutputs(regex="[^a]*")).mask(())
    assert mask.shape == ((width + 31) // 32,)
    assert not unpack_mask(mask, 32 * len(mask))[ByteTokenizer().vocab_size :].any()


@pytest.mark.parametrize(
    ("wanted", "texts"),
    [
        (StructuredOutputs(choice=["yes", "no", 'a "b"\\c\n', "gr\u00fc\u00df \U0001f600"]), None),
        (StructuredOutputs(json_object=True), ["{}", '{"a": [1, {"b": null}]}', '{\n    "a": "\u00e9"\n}']),
        (StructuredOutputs(grammar='root ::= "x" root | "y"'), ["y", "xxxy"]),
        (StructuredOutputs(grammar='start: "x" start | "y"'), ["y", "xxxy"]),
    ],
)
def test_each_kind_takes_its_texts_whole(wanted: StructuredOutputs, texts: list[str] | None) -> None:
    for text in texts or wanted.choice:
        grammar = compiled(wanted)
        for token in text.encode()[:-1]:
            assert is_allowed(grammar.mask(()), token)
            assert not grammar.advance(token)
        assert is_allowed(grammar.mask(()), text.encode()[-1])
        assert grammar.advance(text.encode()[-1])


def test_blanks_of_json_have_a_bound() -> None:
    grammar = compiled(StructuredOutputs(json_object=True))
    assert " " in allowed(grammar, "{\n" + 63 * " ")
    for blanks in ("\n" + 64 * " ", "  "):
        assert not {" ", "\t", "\n"} & set(allowed(grammar, "{" + blanks))
    assert "\n" not in allowed(grammar, "{\n  ")


def test_paths_in_any_order_leave_no_trace() -> None:
    """Masks of a random tree, asked for in random order, equal those of a fresh grammar that consumed the path."""
    rng = np.random.default_rng(0)
    for wanted in (PERSON, LIST, WORDS):
        grammar, committed = compiled(wanted), list[int]()
        for _ in range(6):
            paths: list[list[int]] = [[]]
            for _ in range(8):
                path = paths[rng.integers(len(paths))]
                tokens = np.flatnonzero(unpack_mask(grammar.mask(path), VOCAB))
                if not grammar.is_complete(path):
                    paths.append([*path, int(rng.choice(tokens))])
            rng.shuffle(paths)
            for path in paths:
                fresh = compiled(wanted)
                for token in [*committed, *path]:
                    fresh.advance(token)
                assert grammar.is_complete(path) == fresh.is_complete(())
                if not grammar.is_complete(path):
                    assert np.array_equal(grammar.mask(path), fresh.mask(()))
            for token in paths[0][:2]:
                committed.append(token)
                if grammar.advance(token):
                    return


def test_a_copy_goes_its_own_way() -> None:
    grammar = compiled(WORDS)
    grammar.mask(b"ca")
    other = grammar.fork()
    grammar.advance(ord("d"))
    assert allowed(other, "") == "cd"
    assert allowed(grammar, "") == "o"


def test_a_tokenizer_that_spells_otherwise_constrains_all_the_same() -> None:
    """One that puts a space before a text, one whose ids are no spelling of it: the grammar's bytes decide."""

    class Spaced(ByteTokenizer):
        def encode(self, text: str, *, add_special: bool = False, parse_special: bool = False) -> list[int]:
            return super().encode(" " + text)

    class Wrong(ByteTokenizer):
        def encode(self, text: str, *, add_special: bool = False, parse_special: bool = False) -> list[int]:
            return [1, 2]

    for tokenizer in (Spaced(), Wrong()):
        grammar = GrammarCompiler(tokenizer, VOCAB).compile(StructuredOutputs(regex="hello|help"))
        assert allowed(grammar, "") == "h"
        assert allowed(grammar, "hel") == "lp"


# ── through the engine ───────────────────────────────────────────────────────────────────────────────────────────────

SPECS = ["ngram", "model", "padded", "narrow", "tree", "ngram+model", "text", "tli"]
GREEDY = {"temperature": 0, "max_tokens": MAX_TOKENS}
SEEDED = {"temperature": 1.2, "seed": 4, "max_tokens": MAX_TOKENS}


def check(wanted: StructuredOutputs, out: Completion) -> None:
    assert out.finish_reason in ("stop", "length")
    if out.finish_reason == "length":
        assert len(out.token_ids) == MAX_TOKENS
    elif wanted is PERSON:
        person = json.loads(out.text)
        assert re.fullmatch("[a-z]{1,12}", person["name"])
        assert 0 <= person["age"] <= 150
        assert set(person["tags"]) <= {"red", "green", "blue"}
    elif wanted is LIST:
        assert isinstance(json.loads(re.sub(r"\b0+(?=\d)", "", out.text)), list)
    else:
        assert re.fullmatch(wanted.regex or "", out.text)


@pytest.mark.parametrize("fields", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("wanted", [PERSON, LIST, WORDS], ids=["schema", "lark", "regex"])
def test_the_text_is_legal_and_the_same_whatever_speculates(wanted: StructuredOutputs, fields: dict[str, Any]) -> None:
    params = SamplingParams(structured_outputs=wanted, **fields)
    plain = generator().generate(PROMPTS, params)
    for out in plain:
        check(wanted, out)
    for spec in SPECS:
        gen = generator(spec)
        outs = gen.generate(PROMPTS, params)
        assert [o.token_ids for o in outs] == [p.token_ids for p in plain], spec
        assert [(o.text, o.finish_reason) for o in outs] == [(p.text, p.finish_reason) for p in plain]
        gen.engine.check_integrity()


@pytest.mark.parametrize("native", [True, False], ids=["native", "reference"])
@pytest.mark.parametrize("method", ["standard", "block"])
def test_drawn_drafts_give_legal_texts(method: str, native: bool) -> None:
    gen = Generator(
        target(), ByteTokenizer(), drafters("model"), num_speculative_tokens=4, adaptive=False,
        rejection_sample_method=method, native=native,
    )  # fmt: skip
    for wanted in (PERSON, LIST, WORDS):
        outs = gen.generate(PROMPTS, SamplingParams(structured_outputs=wanted, n=4, max_tokens=MAX_TOKENS))
        for out in outs:
            check(wanted, out)
        assert sum(o.speculation.num_accepted_tokens for o in outs) > 0
    gen.engine.check_integrity()


def test_a_draft_model_under_the_grammar_is_accepted_often() -> None:
    """Without the mask most of its tokens would be letters that the grammar forbids."""
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, structured_outputs=PERSON)
    out = generator("model").generate(PROMPTS[0], params)[0]
    assert out.speculation.acceptance_rate > 0.35


class Scripted:
    """Proposes given tokens, in turn or by the text's last token; with `probs` they count as drawn."""

    name = "scripted"
    needs = DraftNeeds()

    def __init__(self, *drafts: Draft, after: Mapping[int, Draft] | None = None) -> None:
        self._drafts = drafts
        self._after = after or {}
        self.seen: list[Draft] = []

    def begin(self, seq: SequenceView) -> None: ...

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        in_turn = (self._drafts[len(r.seq.tokens) % len(self._drafts)] for r in requests)
        return [self._after.get(r.seq.tokens[-1], draft) for r, draft in zip(requests, in_turn, strict=True)]

    def observe(self, seq: SequenceView, draft: Draft, verdict: Verdict, hidden: Array | None) -> None:
        self.seen.append(draft)

    def end(self, seq: SequenceView) -> None: ...


def scripted(text: bytes | list[int], probs: NDArray[np.float32] | None = None) -> Draft:
    return Draft(list(text), probs=probs, source="scripted")


def run(drafter: Scripted, wanted: StructuredOutputs, **fields: Any) -> Completion:
    gen = Generator(
        target(), ByteTokenizer(), [drafter], num_speculative_tokens=64, adaptive=False, native=True
    )  # fmt: skip
    params = SamplingParams(**{"temperature": 0, "max_tokens": 60, "structured_outputs": wanted, **fields})
    [out] = gen.generate("abc", params)
    gen.engine.check_integrity()
    return out


def test_illegal_tokens_ends_in_mid_block_and_a_grammar_that_ends_inside_one() -> None:
    """What made other engines crash: each kind of draft at every place of the text."""
    plain = generator().generate("abc", SamplingParams(temperature=0, max_tokens=60, structured_outputs=WORDS))[0]
    text = plain.text.encode()
    for garbage in (b"zz", [END], [END, END, ord("c")], b"!", b"!!!", [VOCAB - 1]):
        drafter = Scripted(*(scripted([*text[i % 7 :][:5], *garbage, *text[:3]]) for i in range(11)))
        out = run(drafter, WORDS)
        assert (out.token_ids, out.finish_reason) == (plain.token_ids, plain.finish_reason)


def test_a_block_that_runs_past_the_end_of_the_grammar() -> None:
    wanted = StructuredOutputs(choice=["yes", "no"])
    for first in ("yes", "no"):
        rest = first[1:].encode()
        for tail in (b"", b"more", bytes([0]), [END], [END, ord("x")]):
            bias = {ord(first[0]): 100.0}
            drafter = Scripted(scripted([*rest, *tail]))
            out = run(drafter, wanted, logit_bias=bias)
            assert (out.text, out.finish_reason) == (first, "stop")
            assert list(out.token_ids) == list(first.encode())
            assert all(tuple(d.tokens) == tuple(rest)[-len(d.tokens) :] for d in drafter.seen if d.tokens)


@pytest.mark.parametrize("method", ["standard", "block"])
def test_drawn_drafts_that_know_no_grammar_never_get_through(method: str) -> None:
    probs = np.full((6, VOCAB), 1 / VOCAB, dtype=np.float32)
    texts = {"c": b"at cow", "a": b"t cowz", "o": [*b"w", END, *b"zzzz"], " ": b"cowzzz", "d": b"og zzz"}
    after = {ord(letter): scripted(text, probs) for letter, text in texts.items()}
    drafter = Scripted(scripted(b"zzzzzz", probs), after=after)
    gen = Generator(
        target(), ByteTokenizer(), [drafter], num_speculative_tokens=8, adaptive=False, rejection_sample_method=method
    )  # fmt: skip
    for out in gen.generate(
        "abc", SamplingParams(seed=3, temperature=9, structured_outputs=WORDS, n=8, max_tokens=MAX_TOKENS)
    ):
        check(WORDS, out)
    assert {len(d.tokens) for d in drafter.seen} >= {4, 6}  # cut behind the first illegal token, which stays; whole


def test_the_end_comes_only_where_the_grammar_has_one() -> None:
    """A model that wants nothing but to end."""
    params = SamplingParams(temperature=0, max_tokens=60, structured_outputs=WORDS, logit_bias={END: 100.0})
    for spec in ("none", "ngram", "model"):
        out = generator(spec).generate("abc", params)[0]
        assert re.fullmatch("(cat|cow|dog)( (cat|cow|dog)){2}", out.text)
        assert (out.token_ids[-1], out.finish_reason) == (END, "stop")


def test_a_complete_text_ends_whatever_min_tokens_and_ignore_eos_say() -> None:
    wanted = StructuredOutputs(regex="ab{1,3}")
    for fields in ({"min_tokens": 30}, {"ignore_eos": True}, {"min_tokens": 30, "ignore_eos": True}):
        out = run(Scripted(scripted(b"bbbb")), wanted, **fields)
        assert (out.text, out.finish_reason) == ("abbb", "stop") if "min_tokens" in fields else (out.text, "stop")


def test_min_tokens_hold_the_end_back_while_the_grammar_can_go_on() -> None:
    wanted = StructuredOutputs(regex="ab*")
    out = run(Scripted(scripted(b"b")), wanted, min_tokens=20, logit_bias={END: 100.0})
    assert len(out.token_ids) == 21
    assert out.finish_reason == "stop"


def test_max_tokens_and_stop_strings_end_an_unfinished_text() -> None:
    out = run(Scripted(scripted(b"at cow")), WORDS, max_tokens=6)
    assert (len(out.token_ids), out.finish_reason) == (6, "length")
    out = run(Scripted(scripted(b"at cow")), WORDS, stop=" ")
    assert (out.text in ("cat", "cow", "dog"), out.finish_reason) == (True, "stop")


class Speechless(ByteTokenizer):
    """Has no token for the letter q."""

    def token_bytes(self, id: int) -> bytes:
        return b"" if id == ord("q") else super().token_bytes(id)


def test_a_text_that_the_vocabulary_cannot_spell() -> None:
    grammar = GrammarCompiler(Speechless(), VOCAB).compile(StructuredOutputs(regex="a(b|c)(qu|qx)"))
    for letter in b"ab":
        assert not grammar.advance(letter)
    with pytest.raises(GrammarError, match="no token for b'q'"):
        grammar.mask(())


@pytest.mark.parametrize("spec", ["none", "ngram", "model"])
def test_a_text_that_cannot_go_on_ends_with_an_error_and_harms_no_other(spec: str) -> None:
    """5,000 properties, each of which may come next, are more than a grammar may have open."""
    large = {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(5000)}}
    doomed = SamplingParams(temperature=0, structured_outputs=StructuredOutputs(json_schema=json.dumps(large)))
    other = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    gen = generator(spec)
    [bad], [good] = gen.submit(list(b"abc"), doomed), gen.submit(list(b"abc"), other)
    errors = []
    while gen.has_unfinished:
        errors += [chunk for chunk in gen.step() if chunk.error is not None]
    assert [(chunk.request_id, chunk.finish_reason) for chunk in errors] == [(bad.request_id, "abort")]
    assert isinstance(errors[0].error, GrammarError)
    assert bad.output
    assert tuple(good.output) == tuple(generator().generate("abc", other)[0].token_ids)
    gen.engine.check_integrity()


def test_bias_cannot_forbid_all_that_a_grammar_allows() -> None:
    out = run(
        Scripted(scripted(b"")), StructuredOutputs(choice=["yes"]), logit_bias={ord("y"): -100.0, ord("e"): -100.0}
    )
    assert out.text == "yes"


def test_choices_of_one_request_each_have_their_own_place() -> None:
    params = SamplingParams(temperature=2.0, seed=1, n=6, max_tokens=MAX_TOKENS, structured_outputs=WORDS)
    outs = generator("ngram+model").generate("abc", params)
    for out in outs:
        check(WORDS, out)
    assert len({o.text for o in outs}) > 1


def test_grammars_and_free_texts_share_a_batch() -> None:
    free = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    bound = SamplingParams(temperature=0, max_tokens=40, structured_outputs=PERSON)
    gen = generator("ngram+model")
    requests = [gen.submit(list(b"abc"), params)[0] for params in (free, bound, free, bound)]
    while gen.has_unfinished:
        gen.step()
    alone = [generator().generate("abc", params)[0].token_ids for params in (free, bound)]
    assert [tuple(seq.output) for seq in requests] == [*alone, *alone]


def test_masks_are_made_for_drafted_rows_only(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    original = Grammar.mask
    monkeypatch.setattr(Grammar, "mask", lambda self, path: made.append(len(path)) or original(self, path))
    grammar = compiled(WORDS)
    draft = cut_draft(Draft(list(b"cat cow!zzzzzzzzzzz")), grammar)
    assert bytes(draft.tokens) == b"cat cow"
    masks_along(draft, grammar)
    assert max(made) == 7


def test_prompts_of_one_request_share_what_was_compiled_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = GrammarCompiler(ByteTokenizer(), VOCAB)
    compiled: list[StructuredOutputs] = []
    compile_once = GrammarCompiler._compile
    monkeypatch.setattr(
        GrammarCompiler, "_compile", lambda self, wanted: compiled.append(wanted) or compile_once(self, wanted)
    )
    first, second = compiler.compile(WORDS), compiler.compile(StructuredOutputs(regex=WORDS.regex))
    start = second.mask(()).copy()
    first.advance(ord("c"))
    assert not np.array_equal(first.mask(()), start)
    assert np.array_equal(second.mask(()), start)
    assert np.array_equal(compiler.compile(WORDS).mask(()), start)
    compiler.compile(LIST)
    assert compiled == [WORDS, LIST]
