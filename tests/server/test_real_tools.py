"""Calls and formats of a real model, through the `openai` client."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from foredraft import LLM
from tests.server.serving import running_server
from tests.server.test_structured import OBJECT, ask, json_schema

pytestmark = pytest.mark.pair

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The current weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]}},
            "required": ["city"],
        },
    },
}
ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    llm: Any = LLM("qwen2.5-coder-0.5b", "ngram", max_model_len=2048)
    llm.gate = threading.Event()  # as the server of these tests expects it
    with running_server(llm) as server, openai.OpenAI(base_url=server.url + "/v1", api_key="x") as client:
        yield client


def question(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize("drafts", [None, 0], ids=["drafted", "plain"])
@pytest.mark.parametrize(
    ("text", "choice", "expected"),
    [
        ("What is the weather in Paris right now?", "auto", {"city": "Paris"}),
        ("What is 17 plus 25? Use the tool.", "required", {"a": 17, "b": 25}),
        ("What is 17 plus 25?", {"type": "function", "function": {"name": "add"}}, {"a": 17, "b": 25}),
    ],
    ids=["auto", "required", "named"],
)
def test_calls_of_qwen(
    client: openai.OpenAI, text: str, choice: Any, expected: dict[str, Any], drafts: int | None
) -> None:
    message, reason = ask(
        client,
        messages=question(text),
        tools=[WEATHER, ADD],
        tool_choice=choice,
        temperature=0,
        max_tokens=100,
        extra_body={"speculation": {"num_speculative_tokens": drafts}},
    )
    (call,) = message["tool_calls"]
    assert reason == "tool_calls"
    assert expected.items() <= json.loads(call["arguments"]).items()


def test_the_answer_after_a_call(client: openai.OpenAI) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 17, "b": 25}'}}
    history = [
        *question("What is 17 plus 25?"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "42"},
    ]
    fields = {"tools": [ADD], "tool_choice": "none", "temperature": 0, "max_tokens": 60}
    message, _ = ask(client, messages=history, **fields)
    assert "42" in message["content"]
    assert message["tool_calls"] == []


def test_a_schema_gives_the_same_text_with_and_without_drafts(client: openai.OpenAI) -> None:
    texts = set()
    for drafts in (None, 0):
        message, reason = ask(
            client,
            messages=question("A colour and a size, as JSON"),
            response_format=json_schema(OBJECT),
            temperature=0,
            extra_body={"speculation": {"num_speculative_tokens": drafts}},
        )
        texts.add(message["content"])
        assert reason == "stop"
    (text,) = texts
    assert set(json.loads(text)) == {"colour", "size"}
