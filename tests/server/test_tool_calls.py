"""Calls in an answer's text: the same calls and content however the text is cut into pieces."""

from __future__ import annotations

import json

import numpy as np
import pytest

from foredraft.server.reasoning import ReasoningReader, Thinking, thinking_after
from foredraft.server.tool_calls import CallDelta, Delta, ToolCallReader
from foredraft.testing import ByteTokenizer

NAMES = frozenset({"weather", "add"})
ROME = '{"city": "Rome"}'


def tagged(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


#: text -> content, calls
ANSWERS = {
    "": ("", []),
    "hello": ("hello", []),
    " hello \n": (" hello \n", []),
    tagged("weather", ROME): ("", [("weather", ROME)]),
    "Let me see.\n" + tagged("weather", ROME) + "\n": ("Let me see.", [("weather", ROME)]),
    tagged("weather", ROME) + "\n" + tagged("add", '{"a": [1, {"b": "}"}]}'): (
        "",
        [("weather", ROME), ("add", '{"a": [1, {"b": "}"}]}')],
    ),
    tagged("weather", ROME) + " Done.": ("Done.", [("weather", ROME)]),
    "A " + tagged("add", "{}") + " B": ("A B", [("add", "{}")]),
    # Strings may hold anything, the closing tag too.
    tagged("add", r'{"x": "</tool_call> \" } {\\"}'): ("", [("add", r'{"x": "</tool_call> \" } {\\"}')]),
    tagged("add", '{ "x" :\n1.5e3 }'): ("", [("add", '{ "x" :\n1.5e3 }')]),
    tagged("add", '{"x": "\u00e9\U0001f600"}'): ("", [("add", '{"x": "\u00e9\U0001f600"}')]),
    # Layout, order and forms that models take liberties with.
    '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>': ("", [("add", '{"a": 1}')]),
    '<tool_call>{"name": "add"}</tool_call>': ("", [("add", "{}")]),
    '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>': ("", [("add", '{"a": 1}')]),
    '<tool_call>{"name": "add", "parameters": {"a": 1}}</tool_call>': ("", [("add", '{"a": 1}')]),
    '<tool_call>{"name": "add", "arguments": {"a": 1}}': ("", [("add", '{"a": 1}')]),
    '<tool_call>{"name": "add", "arguments": {"a": 1}} and so on': ("and so on", [("add", '{"a": 1}')]),
    '{"name": "add", "arguments": {"a": 1}}': ("", [("add", '{"a": 1}')]),
    ' {"name": "add", "parameters": {"a": 1}}\n': ("", [("add", '{"a": 1}')]),
    '```json\n{"name": "add", "arguments": {"a": 1}}\n```': ("", [("add", '{"a": 1}')]),
    '```\n{"name": "add", "arguments": {"a": 1}}\n```\nOK': ("OK", [("add", '{"a": 1}')]),
    '{"name": "add", "arguments": {"a": 1}}\n{"name": "weather", "arguments": {}}': (
        "",
        [("add", '{"a": 1}'), ("weather", "{}")],
    ),
    # What is no call is content, whole.
    tagged("unknown", "{}"): (tagged("unknown", "{}"), []),
    "x " + tagged("unknown", "{}") + tagged("add", "{}"): ("x " + tagged("unknown", "{}"), [("add", "{}")]),
    '{"name": "Bob", "arguments": {}}': ('{"name": "Bob", "arguments": {}}', []),
    '{"arguments": {}, "name": "add"}': ('{"arguments": {}, "name": "add"}', []),
    '{"a": 1}': ('{"a": 1}', []),
    'So: {"name": "add", "arguments": {}}': ('So: {"name": "add", "arguments": {}}', []),
    "```python\nprint(1)\n```": ("```python\nprint(1)\n```", []),
    "``` {": ("``` {", []),
    "<tool_call>\nnothing</tool_call>": ("<tool_call>\nnothing</tool_call>", []),
    '<tool_call>{"name": "add", "arguments": [1]}</tool_call>': (
        '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
        [],
    ),
    "a < b <tool_cal": ("a < b <tool_cal", []),
    "  ": ("  ", []),
    # Cut off by max_tokens.
    '<tool_call>\n{"name": "add", "arguments": {"a": "lo': ("", [("add", '{"a": "lo')]),
    'Hm <tool_call>\n{"name": "ad': ('Hm <tool_call>\n{"name": "ad', []),
    "x <tool_": ("x <tool_", []),
    tagged("add", "{}") + '\n<tool_call>\n{"na': ("", [("add", "{}")]),
}


def read(pieces: list[str], **options: int) -> tuple[str, list[tuple[str, str]]]:
    reader = ToolCallReader(NAMES, **options)
    content, calls = "", list[list[str]]()
    for delta in [*map(reader.feed, pieces), reader.finish()]:
        content += delta.content
        assert len({call.index for call in delta.calls}) == len(delta.calls)
        for call in delta.calls:
            if call.name is not None:
                assert call.index == len(calls)
                calls.append([call.name, ""])
            assert call.index == len(calls) - 1
            calls[-1][1] += call.arguments
    assert reader.has_calls == bool(calls)
    return content, [(name, arguments) for name, arguments in calls]


def cuts(text: str, rng: np.random.Generator) -> list[str]:
    at = sorted(rng.integers(0, len(text) + 1, size=rng.integers(0, 6)).tolist())
    return [text[a:b] for a, b in zip([0, *at], [*at, len(text)], strict=True)]


@pytest.mark.parametrize("text", ANSWERS, ids=repr)
def test_whole_by_letters_and_in_random_pieces(text: str) -> None:
    rng = np.random.default_rng(len(text))
    for pieces in ([text], list(text), *(cuts(text, rng) for _ in range(40))):
        assert read(pieces) == ANSWERS[text], pieces


def test_arguments_flow_as_they_come() -> None:
    reader = ToolCallReader(NAMES)
    assert reader.feed('Hi <tool_call>\n{"name": "add", "argum') == Delta("Hi")
    assert reader.feed('ents": {"a') == Delta(calls=(CallDelta(0, "add", '{"a'),))
    assert reader.feed('": 1') == Delta(calls=(CallDelta(0, None, '": 1'),))
    assert reader.feed('}}\n</tool_call><tool_call>{"name": "weather", "arguments": {}}</tool_call>') == Delta(
        calls=(CallDelta(0, None, "}"), CallDelta(1, "weather", "{}"))
    )


def test_an_object_that_is_no_call_does_not_wait_for_its_end() -> None:
    assert ToolCallReader(NAMES).feed('{"answer": [1, 2').content == '{"answer": [1, 2'
    assert ToolCallReader(NAMES).feed('{"name": "Bo').content == '{"name": "Bo'
    assert ToolCallReader(NAMES).feed('{"name": "ad').content == ""


def test_nothing_comes_behind_the_last_call_that_is_wanted() -> None:
    text = tagged("add", "{}") + "\n" + tagged("add", '{"a": 1}') + " and so on"
    rng = np.random.default_rng(0)
    for pieces in ([text], list(text), *(cuts(text, rng) for _ in range(20))):
        assert read(pieces, max_num_calls=1) == ("", [("add", "{}")])


def test_a_call_that_is_demanded_and_cut_off_is_no_content() -> None:
    for text in ("<tool_c", '<tool_call>\n{"name": "ad', '{"name"', "`"):
        assert read(list(text), is_demanded=True) == ("", [])


def test_long_arguments_take_time_in_proportion() -> None:
    """Letter by letter, 200,000 of them, with the keys in the order that has to wait: no rescanning."""
    arguments = json.dumps({"text": "x" * 50_000})
    for text in (tagged("add", arguments), f'<tool_call>{{"arguments": {arguments}, "name": "add"}}</tool_call>'):
        assert read([text[i : i + 50] for i in range(0, len(text), 50)]) == ("", [("add", arguments)])


# ── thoughts ─────────────────────────────────────────────────────────────────────────────────────────────────────────

#: where the prompt leaves off, text -> reasoning, content
THOUGHTS: dict[tuple[Thinking, str], tuple[str, str]] = {
    ("possible", "<think>\nhm, 1 < 2\n</think>\n\nYes."): ("hm, 1 < 2", "Yes."),
    ("possible", "\n<think>a</think>b"): ("a", "b"),
    ("possible", " Yes. <think>no</think>"): ("", " Yes. <think>no</think>"),
    ("possible", "<thin air"): ("", "<thin air"),
    ("possible", "<thi"): ("", "<thi"),
    ("possible", ""): ("", ""),
    ("possible", "<think>\n\n</think>\n\nYes"): ("", "Yes"),
    ("possible", "<think>never ends </thin"): ("never ends </thin", ""),
    ("inside", "\nhm </b> \n\n ok\n</think>\n\nYes. \n"): ("hm </b> \n\n ok", "Yes. \n"),
    ("inside", "hm"): ("hm", ""),
    ("over", "<think>Yes"): ("", "<think>Yes"),
    ("inside", "a</think>b</think>c"): ("a", "b</think>c"),
    ("inside", "a</think>  "): ("a", ""),
}


@pytest.mark.parametrize(("thinking", "text"), THOUGHTS, ids=repr)
def test_thoughts_are_parted_from_the_answer(thinking: Thinking, text: str) -> None:
    rng = np.random.default_rng(len(text))
    for pieces in ([text], list(text), *(cuts(text, rng) for _ in range(40))):
        reader = ReasoningReader(thinking)
        parts = [*map(reader.feed, pieces), reader.finish()]
        found = "".join(p.reasoning for p in parts), "".join(p.content for p in parts)
        assert found == THOUGHTS[thinking, text], pieces


def test_the_end_of_the_prompt_tells_where_thinking_stands() -> None:
    tokenizer = ByteTokenizer()
    assert thinking_after(tokenizer, list(b"<think>")) is None
    tokenizer.chat_template = "{% if thinks %}<think>{% endif %}"
    for prompt, expected in (
        (b"user: x <think>\n", "inside"),
        (b"<think>\n\n</think>\n\n", "over"),
        (b"x", "possible"),
    ):
        assert thinking_after(tokenizer, list(prompt)) == expected
