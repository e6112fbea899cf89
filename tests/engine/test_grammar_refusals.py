"""Grammars that cannot be, are too large, or that the compiler fails on: refused, and nothing else suffers."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import llguidance
import pytest

from foredraft.engine.grammar import MAX_CHARACTERS, Grammar, GrammarCompiler
from foredraft.errors import ParameterError
from foredraft.types import SamplingParams, StructuredOutputs
from tests.engine.build import VOCAB, generator
from tests.engine.test_grammar import Speechless, compiler


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"json_schema": "{"}, "cannot be read"),
        ({"json_schema": ""}, "cannot be read"),
        ({"json_schema": '{"type": "foo"}'}, "cannot be compiled: Invalid type"),
        ({"json_schema": '{"type": "integer", "minimum": 5, "maximum": 3}'}, "Unsatisfiable schema"),
        ({"json_schema": '{"not": {}, "contains": {}}'}, "not supported in a schema: contains, not; say it by other"),
        ({"regex": "ab("}, r'cannot be compiled: unclosed group, at "\("$'),
        ({"regex": "a/b(?=c)d"}, r'compiled: look-around, .* is not supported, at "\(\?=c\)d"$'),
        ({"json_schema": '{"type": "string", "pattern": "[0-9"}'}, r'compiled: unclosed character class, at "\[0-9"$'),
        ({"grammar": "start: /a(/"}, r'at 1\(8\): invalid regex "a\(" .*: unclosed group, at "\("$'),
        ({"regex": r"[^\s\S]"}, "cannot be satisfied: no text matches"),
        ({"grammar": "start: start"}, "cannot be satisfied: no text matches"),
        ({"grammar": "start: nothing"}, "unknown name"),
        ({"regex": ""}, "allow the empty text only"),
    ],
)
def test_what_cannot_be_is_refused_when_it_is_submitted(fields: dict[str, str], problem: str) -> None:
    gen = generator()
    with pytest.raises(ParameterError, match=problem) as caught:
        gen.stream("abc", SamplingParams(structured_outputs=StructuredOutputs(**fields)))  # type: ignore[arg-type]
    assert caught.value.field == "structured_outputs"
    assert "\n" not in str(caught.value)
    assert "<state>" not in str(caught.value)
    assert not gen.has_unfinished


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"regex": "a", "json_object": True},
        {"choice": [""]},
        {"choice": "ab", "regex": "a"},
        {"regex": 5},
        {"choice": 7},
    ],
)
def test_exactly_one_kind(fields: dict[str, Any]) -> None:
    with pytest.raises(ParameterError) as caught:
        StructuredOutputs(**fields)
    assert caught.value.field == "structured_outputs"


@pytest.mark.parametrize(
    "wanted",
    [
        StructuredOutputs(
            grammar="start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(15_000)) + '\nr15000: "yes"'
        ),
        StructuredOutputs(
            json_schema=json.dumps(
                {
                    "$ref": "#/$defs/d0",
                    "$defs": {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}]} for i in range(4_000)}
                    | {"d4000": {"const": "yes"}},
                }
            )
        ),
    ],
    ids=["lark", "json"],
)
def test_a_long_chain_of_references_does_not_overflow_the_stack(wanted: StructuredOutputs) -> None:
    """Compiled on an ordinary stack it ends the process."""
    params = SamplingParams(temperature=0, max_tokens=8, structured_outputs=wanted)
    assert generator().generate("abc", params)[0].text.strip('"') == "yes"


def test_grammars_compiled_at_once_leave_the_stacks_of_other_threads_as_they_were(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def slow_stack_size(size: int) -> int:
        before = threading.stack_size(size)
        time.sleep(0.02)  # for the others to come in between
        return before

    monkeypatch.setattr("foredraft.engine.grammar.stack_size", slow_stack_size)
    before = threading.stack_size()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(compiler().compile, (StructuredOutputs(regex=f"a{i}") for i in range(8))))
    assert threading.stack_size() == before


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"regex": "x" * (MAX_CHARACTERS + 1)}, f"have {MAX_CHARACTERS + 1} characters, and {MAX_CHARACTERS} is the"),
        ({"choice": ["x" * MAX_CHARACTERS, "y"]}, f"have {MAX_CHARACTERS + 1} characters"),
        (
            {"grammar": "start: R0\n" + "\n".join(f"R{i}: R{i + 1} R{i + 1}" for i in range(30)) + '\nR30: "z"'},
            "too big",
        ),
    ],
    ids=["text", "choices", "doubling"],
)
def test_a_grammar_that_takes_too_long_is_refused(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(ParameterError, match=problem) as caught:
        compiler().compile(StructuredOutputs(**fields))
    assert len(str(caught.value)) < 400
    assert "\n" not in str(caught.value)


def test_a_fault_of_the_compiler_is_told_without_its_details(monkeypatch: pytest.MonkeyPatch) -> None:
    class Panicking:
        def __init__(self, *args: Any, **options: Any) -> None: ...
        def is_error(self) -> bool:
            return True

        def get_error(self) -> str:
            return "panic: index out of bounds at src/parser.rs:42\n<backtrace> 0: rust_begin_unwind"

    schema = json.dumps({"allOf": [{"anyOf": [{"type": "string"}]}]})
    monkeypatch.setattr(llguidance, "LLMatcher", Panicking)
    monkeypatch.setattr("foredraft.engine.grammar._translate", lambda wanted: "")
    with pytest.raises(ParameterError) as caught:
        compiler().compile(StructuredOutputs(json_schema=schema))
    assert str(caught.value) == (
        "structured_outputs cannot be compiled: the compiler failed on it, which uses allOf, anyOf; "
        "write it more simply"
    )


def test_a_panic_of_the_compiler_is_the_requests_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    class PanicException(BaseException):
        """As those of a Rust library: no Exception."""

    def panic(self: GrammarCompiler, wanted: StructuredOutputs) -> Grammar:
        raise PanicException("called `Option::unwrap()` on a `None` value")

    monkeypatch.setattr(GrammarCompiler, "_compile", panic)
    with pytest.raises(ParameterError, match="the compiler failed on it; write it more simply"):
        compiler().compile(StructuredOutputs(regex="new"))


def test_a_grammar_that_begins_with_what_no_token_spells() -> None:
    with pytest.raises(ParameterError, match=r"cannot be followed: the vocabulary has no token for b'q'$"):
        GrammarCompiler(Speechless(), VOCAB).compile(StructuredOutputs(regex="qu|qx"))
