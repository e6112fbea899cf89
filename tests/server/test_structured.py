"""Formats and tools through the `openai` client: constrained texts, calls, thoughts; streamed equals blocking."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import openai
import pytest
from numpy.typing import NDArray

from foredraft.drafters.ngram import NgramDrafter
from foredraft.errors import ParameterError
from foredraft.models.base import Rows
from foredraft.server.constraints import CallStyle, ToolUse, wanted_format, wanted_text
from foredraft.server.protocol import ChatCompletionRequest
from foredraft.testing import ByteTokenizer, TinyModel
from tests.server.serving import GatedGenerator, Server, make_generator, running_server
from tests.server.test_limits import eventually

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
THINKING = TEMPLATE.replace("<|assistant|>{%", "<|assistant|><think>\n{%")

COLOUR = {"enum": ["red", "green", "blue"]}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"$ref": "#/$defs/days"}},
            "required": ["city", "days"],
            "additionalProperties": False,
            "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
        },
    },
}
PAINT = {
    "type": "function",
    "function": {"name": "paint", "parameters": {"properties": {"colour": COLOUR}, "required": ["colour"]}},
}
NOW = {"type": "function", "function": {"name": "now"}}
TOOLS: list[Any] = [WEATHER, PAINT, NOW]
HELLO: list[Any] = [{"role": "user", "content": "hello"}]


class Parrot(TinyModel):
    """Says `script` from position `start` on, then ends."""

    script: Sequence[int] = ()
    start = 0

    def forward(self, batch: Sequence[Rows], hidden_layers: Sequence[int] = ()) -> NDArray[np.float32]:
        logits = super().forward(batch, hidden_layers)
        positions = [r.start + i for r in batch for i in range(len(r.tokens))[len(r.tokens) - r.num_logits :]]
        for row, position in zip(logits, positions, strict=True):
            said = position + 1 - self.start
            if self.script and said >= 0:
                row[self.script[said] if said < len(self.script) else ByteTokenizer.EOS] += 1000
        return logits


@contextmanager
def serving(template: str, **settings: Any) -> Iterator[tuple[Server, openai.OpenAI]]:
    model = Parrot(vocab_size=272, max_model_len=512, num_blocks=160, kinship=8.0)
    tokenizer = ByteTokenizer()
    tokenizer.chat_template = template
    generator = GatedGenerator(model, tokenizer, [NgramDrafter()], adaptive=False, native=False)
    with (
        running_server(generator, **settings) as server,
        openai.OpenAI(base_url=server.url + "/v1", api_key="x") as client,
    ):
        yield server, client


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Server, openai.OpenAI]]:
    with serving(TEMPLATE) as both:
        yield both


@pytest.fixture
def client(served: tuple[Server, openai.OpenAI]) -> openai.OpenAI:
    return served[1]


def gather(stream: Any) -> tuple[dict[str, Any], str | None]:
    """A streamed answer as a message, and its finish reason."""
    message: dict[str, Any] = {"content": None, "reasoning_content": None, "tool_calls": []}
    reason = None
    for chunk in stream:
        for choice in chunk.choices:
            delta = choice.delta.model_dump(exclude_unset=True)
            assert any(delta.values()) or choice.finish_reason, "an event without news"
            for key in ("content", "reasoning_content"):
                if delta.get(key):
                    message[key] = (message[key] or "") + delta[key]
            for call in delta.get("tool_calls") or []:
                if call["index"] == len(message["tool_calls"]):
                    assert call["id"].startswith("call_")
                    message["tool_calls"].append({"name": call["function"]["name"], "arguments": ""})
                message["tool_calls"][call["index"]]["arguments"] += call["function"].get("arguments") or ""
            reason = choice.finish_reason or reason
    return message, reason


def ask(client: openai.OpenAI, **fields: Any) -> tuple[dict[str, Any], str]:
    """Blocking and streamed, which must agree."""
    given: dict[str, Any] = {"model": "tiny", "messages": HELLO, "seed": 1, "max_tokens": 300, **fields}
    (choice,) = client.chat.completions.create(**given).choices
    extra = choice.message.model_extra or {}
    message = {
        "content": choice.message.content,
        "reasoning_content": extra.get("reasoning_content"),
        "tool_calls": [
            {"name": call.function.name, "arguments": call.function.arguments}
            for call in choice.message.tool_calls or []
        ],
    }
    streamed, reason = gather(client.chat.completions.create(**given, stream=True))
    assert {**streamed, "content": streamed["content"] or ""} == {**message, "content": message["content"] or ""}
    assert reason == choice.finish_reason
    return message, choice.finish_reason


def json_schema(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}}


OBJECT = {
    "type": "object",
    "properties": {"colour": COLOUR, "size": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["colour", "size"],
    "additionalProperties": False,
}


def test_a_json_schema_is_kept(client: openai.OpenAI) -> None:
    for seed in range(5):
        message, reason = ask(client, response_format=json_schema(OBJECT), seed=seed)
        answer = json.loads(message["content"])
        assert answer["colour"] in COLOUR["enum"]
        assert 0 <= answer["size"] <= 99
        assert reason == "stop"


def test_any_json_object(client: openai.OpenAI) -> None:
    bias = {str(ord(char)): -20.0 for char in ' \n\t,"[{'}
    message, _ = ask(client, response_format={"type": "json_object"}, logit_bias={**bias, str(ord("}")): 30.0})
    assert json.loads(message["content"]) == {}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_call_is_demanded(client: openai.OpenAI, choice: Any) -> None:
    seen = set()
    for seed in range(6):
        message, reason = ask(client, tools=TOOLS, tool_choice=choice, seed=seed, parallel_tool_calls=False)
        assert reason == "tool_calls"
        assert message["content"] is None
        (call,) = message["tool_calls"]
        seen.add(call["name"])
        arguments = json.loads(call["arguments"])
        if call["name"] == "weather":
            assert arguments["city"] in ("Rome", "Oslo")
            assert 1 <= arguments["days"] <= 9
        elif call["name"] == "paint":
            assert arguments["colour"] in COLOUR["enum"]
        else:
            assert (call["name"], arguments) == ("now", {})
    assert seen <= ({"weather", "paint", "now"} if choice == "required" else {"weather"})


def test_the_log_ends_a_call_as_the_answer_does(client: openai.OpenAI, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "foredraft.requests")
    ask(client, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)  # at once and as a stream
    assert eventually(lambda: caplog.text.count("completion tokens (tool_calls)") == 2)


def test_several_calls(client: openai.OpenAI) -> None:
    bias = {str(ord("\n")): 20.0}
    fields = {"tools": [NOW], "tool_choice": "required", "logit_bias": bias, "max_tokens": 250}
    message, _ = ask(client, **fields)
    assert len(message["tool_calls"]) > 1
    assert {call["name"] for call in message["tool_calls"]} == {"now"}


def test_auto_leaves_the_text_free_and_none_hides_the_tools(served: tuple[Server, openai.OpenAI]) -> None:
    server, client = served
    free, _ = ask(client, tools=TOOLS, max_tokens=30)
    assert not free["tool_calls"]
    plain, _ = ask(client, max_tokens=30)
    assert ask(client, tools=TOOLS, tool_choice="none", max_tokens=30)[0] == plain
    length = server.post("/tokenize", messages=HELLO).json()["count"]
    usage = client.chat.completions.create(model="tiny", messages=HELLO, tools=TOOLS, max_tokens=1).usage
    assert usage is not None
    assert usage.prompt_tokens == length + len("weatherpaintnow")


def test_a_format_and_tools_together(client: openai.OpenAI) -> None:
    kinds = set()
    for first in ("<", "{"):
        bias = {str(ord(first)): 50.0, str(ord("\n")): -100.0}
        message, reason = ask(client, tools=TOOLS, response_format=json_schema(OBJECT), logit_bias=bias)
        kinds.add(reason)
        if not message["tool_calls"]:
            assert set(json.loads(message["content"])) == {"colour", "size"}
    assert kinds == {"tool_calls", "stop"}


def test_other_grammars_by_vllms_names(served: tuple[Server, openai.OpenAI]) -> None:
    server, client = served
    for wanted, pattern in (
        ({"regex": "[ab]{2,5}!"}, "[ab]{2,5}!"),
        ({"choice": ["yes", "no"]}, "yes|no"),
        ({"grammar": 'start: "x" start | "y"'}, "x*y?"),
        ({"json": {"enum": [1, 2]}}, "1|2"),
    ):
        message, _ = ask(client, extra_body={"structured_outputs": wanted}, max_tokens=20)
        assert re.fullmatch(pattern, message["content"])
        text = server.complete("abc", structured_outputs=wanted, seed=2, max_tokens=20).json()["choices"][0]["text"]
        assert re.fullmatch(pattern, text)


def test_a_history_of_calls_reaches_the_template(client: openai.OpenAI) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    messages = [
        *HELLO,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "5"},
    ]
    answer = client.chat.completions.create(model="tiny", messages=messages, tools=TOOLS, max_tokens=2)
    assert answer.usage is not None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": json_schema({"type": "integer", "minimum": 3, "maximum": 2})}, "response_format"),
        ({"response_format": json_schema({"type": "colour"})}, "response_format"),
        ({"response_format": json_schema({"not": {}})}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"extra_body": {"structured_outputs": {"regex": "("}}}, "structured_outputs"),
        ({"extra_body": {"structured_outputs": {}}}, "structured_outputs"),
        ({"extra_body": {"structured_outputs": {"regex": "a", "choice": ["a"]}}}, "structured_outputs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "no"}}}, "tool_choice"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "nothing"}}}],
                "tool_choice": "required",
            },
            "tools",
        ),
        ({"tools": TOOLS, "extra_body": {"structured_outputs": {"regex": "a"}}}, "structured_outputs"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_by_name(client: openai.OpenAI, fields: dict[str, Any], param: str) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="tiny", messages=HELLO, stream=stream, **fields)
        assert caught.value.param == param
    assert client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=1).choices


def test_a_grammar_beyond_its_limits_is_the_requests_fault(client: openai.OpenAI) -> None:
    """Compiled it can be, but not followed: 5,000 properties, each of which may come next."""
    large = {"type": "object", "properties": {f"p{i}": COLOUR for i in range(5000)}}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model="tiny", messages=HELLO, seed=1, logit_bias={"123": 100}, response_format=json_schema(large)
        )
    assert caught.value.code == "grammar_failed"
    assert ask(client, max_tokens=3)[1] == "length"


def test_a_template_without_tools_takes_none() -> None:
    with running_server(make_generator()) as server:
        response = server.chat("hello", tools=TOOLS)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "tools"
        assert server.chat("hello", tools=TOOLS, tool_choice="none", max_tokens=1).status_code == 200


SAID = [
    "Plain text, a < b.",
    'I look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>',
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n'
    '<tool_call>\n{"name": "paint", "arguments": {"colour": "red"}}\n</tool_call>',
    '{"name": "now", "arguments": {}}',
    '```json\n{"name": "paint", "arguments": {"colour": "\u00e9"}}\n```',
    '<tool_call>\n{"name": "unknown", "arguments": {}}\n</tool_call>',
]
CALLED = [[], ["weather"], ["now", "paint"], ["now"], ["paint"], []]


@pytest.mark.parametrize("interval", [1, 7])
@pytest.mark.parametrize("thought", ["", "Hm, 1 < 2.\nOK"])
def test_what_a_model_says_streamed_and_at_once(interval: int, thought: str) -> None:
    """Whatever the events carry: the tool calls and thoughts of both kinds of answer are the same."""
    with serving(THINKING if thought else TEMPLATE, stream_interval=interval) as (server, client):
        model = server.generator.model
        assert isinstance(model, Parrot)
        model.start = server.post("/tokenize", messages=HELLO).json()["count"] + len("weatherpaintnow")
        for text, names in zip(SAID, CALLED, strict=True):
            model.script = (f"{thought}\n</think>\n\n{text}" if thought else text).encode()
            message, reason = ask(client, tools=TOOLS)
            assert [call["name"] for call in message["tool_calls"]] == names
            assert all(isinstance(json.loads(call["arguments"]), dict) for call in message["tool_calls"])
            assert reason == ("tool_calls" if names else "stop")
            assert message["reasoning_content"] == (thought or None)
            content = text if not names else "I look." if text.startswith("I look.") else None
            assert message["content"] == content


def test_thoughts_may_be_left_out_and_come_before_a_format() -> None:
    with serving(THINKING) as (server, client):
        model = server.generator.model
        assert isinstance(model, Parrot)
        model.start = server.post("/tokenize", messages=HELLO).json()["count"]
        model.script = b'so { "a</think>\n\n{"colour": "red", "size": 5}'
        hidden, _ = ask(client, extra_body={"include_reasoning": False})
        assert hidden["reasoning_content"] is None
        message, reason = ask(client, response_format=json_schema(OBJECT))
        assert message["reasoning_content"] == 'so { "a'
        assert json.loads(message["content"]) == {"colour": "red", "size": 5}
        assert reason == "stop"
        with pytest.raises(openai.BadRequestError):  # nothing but JSON is told behind a thought
            ask(client, extra_body={"structured_outputs": {"regex": "a"}})


# ── the grammars themselves ──────────────────────────────────────────────────────────────────────────────────────────


def request(**fields: Any) -> ChatCompletionRequest:
    return ChatCompletionRequest.model_validate({"messages": HELLO, **fields})


@pytest.mark.parametrize(
    ("template", "style"),
    [
        (None, None),
        ("{{ messages }}", None),
        ("{{ tools }} <tool_call>", CallStyle(True, "arguments")),
        ('{% if tools %}{"name": f, "parameters": {}}{% endif %}', CallStyle(False, "parameters")),
    ],
)
def test_the_template_tells_how_calls_are_written(template: str | None, style: CallStyle | None) -> None:
    assert CallStyle.of(template) == style


def test_bare_calls_come_one_at_a_time() -> None:
    tools = ToolUse.of(request(tools=TOOLS, tool_choice="required"), "{{ tools }}")
    assert tools is not None
    assert (tools.max_num_calls, tools.is_required) == (1, True)


@pytest.mark.parametrize(
    ("thinking", "texts", "others"),
    [
        ("inside", ["hm</think>\n\n{}", "</think>{}"], ["{}", "hm"]),
        ("possible", ["<think>hm</think>\n{}", "{}"], ["hm</think>{}"]),
        ("over", ["{}"], ["<think>hm</think>{}"]),
        (None, ["{}"], ["<think>"]),
    ],
)
def test_a_thought_comes_before_the_format(thinking: Any, texts: list[str], others: list[str]) -> None:
    wanted = wanted_text(wanted_format(request(response_format={"type": "json_object"})), None, thinking)
    assert wanted is not None
    compiler = make_generator()._grammars
    for text in [*texts, *others]:
        grammar = compiler.compile(wanted)
        legal = True
        for token in text.encode():
            legal = legal and bool(grammar.mask(())[token // 32] >> token % 32 & 1)
            if not legal:
                break
            is_complete = grammar.advance(token)
        assert (legal and is_complete) == (text in texts), text


def test_a_schema_may_be_true_but_not_a_text_that_is_none() -> None:
    assert wanted_format(request(response_format=json_schema(True))) is not None
    with pytest.raises(ParameterError):
        wanted_text(wanted_format(request(structured_outputs={"json": "5"})), None, "inside")
