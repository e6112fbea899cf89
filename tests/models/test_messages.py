"""Messages: what clients may write, and what templates get."""

from __future__ import annotations

from typing import Any

import pytest

from foredraft.errors import ParameterError
from foredraft.models.chat_template import encode_chat
from foredraft.models.messages import template_messages
from foredraft.testing import ByteTokenizer

HELLO = {"role": "user", "content": "hello"}


def calling(*calls: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": calls}


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (HELLO, HELLO),
        ({"role": "developer", "content": "be brief"}, {"role": "system", "content": "be brief"}),
        (
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]},
            {"role": "user", "content": "a\nb"},
        ),
        ({"role": "assistant", "name": None}, {"role": "assistant", "content": ""}),
        ({"role": "tool", "content": "5", "tool_call_id": "1"}, {"role": "tool", "content": "5", "tool_call_id": "1"}),
        (
            calling({"id": "1", "function": {"name": "f", "arguments": '{"x": 1}'}}),
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": {"x": 1}}}],
            },
        ),
        (
            calling({"function": {"name": "f", "arguments": {"x": 1}}}, {"function": {"name": "g"}}),
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [
                    {"function": {"name": "f", "arguments": {"x": 1}}},
                    {"function": {"name": "g", "arguments": {}}},
                ],
            },
        ),
    ],
)
def test_what_templates_get(message: dict[str, Any], expected: dict[str, Any]) -> None:
    before = repr(message)
    assert template_messages([message]) == [expected]
    assert repr(message) == before


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ("hello", "messages"),
        (HELLO, "messages"),
        (None, "messages"),
        (["hello"], "messages[0]"),
        ([HELLO, {"content": "x"}], "messages[1].role"),
        ([HELLO, {"role": "robot", "content": "x"}], "messages[1].role"),
        ([HELLO, {"role": 5, "content": "x"}], "messages[1].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "developer", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": {"text": "x"}}], "messages[0].content"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text", "text": 5}]}], "messages[0].content[0].text"),
        ([{"role": "assistant", "tool_calls": 5}], "messages[0].tool_calls"),
        ([calling(5)], "messages[0].tool_calls[0].function"),
        ([calling({"function": {"arguments": "{}"}})], "messages[0].tool_calls[0].function"),
        ([calling({"function": {"name": "f", "arguments": "{"}})], "messages[0].tool_calls[0].function.arguments"),
    ],
)
def test_what_is_no_message_is_named(messages: Any, field: str) -> None:
    with pytest.raises(ParameterError) as caught:
        encode_chat(ByteTokenizer(), messages)
    assert caught.value.field == field
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("tools", ["x", {"type": "function"}, ["x"], 5])
def test_what_are_no_tools_is_named(tools: Any) -> None:
    with pytest.raises(ParameterError, match="tools must be a list of"):
        encode_chat(ByteTokenizer(), [HELLO], tools=tools)


def test_tools_that_the_template_would_not_show_are_refused() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    tokenizer = ByteTokenizer()
    with pytest.raises(ParameterError, match="tools are not supported by this model: its chat template knows none"):
        encode_chat(tokenizer, [HELLO], tools=tools)
    tokenizer.chat_template = "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
    assert encode_chat(tokenizer, [HELLO], tools=tools) == [*b"f"]
    assert encode_chat(tokenizer, [HELLO], tools=[]) == []
