"""Chats and completions: what a client sends is what the engine does, and streamed equals blocking."""

from __future__ import annotations

from typing import Any

import pytest

from foredraft.types import SamplingParams
from tests.server.serving import Server, running_server

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


def template(text: str) -> str:
    return f"<|user|>{text}<|end|><|assistant|>"


def chat_of(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_a_chat_is_answered_as_the_library_does(server: Server) -> None:
    answer = server.chat("hello", model="tiny", temperature=0, max_tokens=40).json()
    (choice,) = answer["choices"]
    ids = server.generator.tokenizer.encode(template("hello"), parse_special=True)
    (expected,) = server.library(ids, SamplingParams(temperature=0, max_tokens=40))
    assert choice["message"] == {"role": "assistant", "content": expected.text}
    assert choice["finish_reason"] == expected.finish_reason
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    assert answer["model"] == "tiny"
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(ids), len(expected.token_ids))
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.0},
        {"seed": 3},
        {"seed": 1, "n": 8},
        {"seed": 3, "n": 3, "temperature": 0.7, "top_p": 0.9},
        {"seed": 4, "top_k": 5, "min_p": 0.01},
        {"temperature": 0.0, "presence_penalty": 1.5, "frequency_penalty": 1.0, "repetition_penalty": 1.2},
        {"seed": 1, "stop": ["a"]},
        {"seed": 1, "stop": "b", "min_tokens": 5},
        {"temperature": 0.0, "ignore_eos": True},
        {"seed": 5, "stop_token_ids": [97, 98, 99]},
        {"temperature": 0.0, "max_tokens": 1},
    ],
    ids=str,
)
def test_every_parameter_means_what_it_means_in_the_library(server: Server, fields: dict[str, Any]) -> None:
    fields = {"max_tokens": 60, **fields}
    expected = server.library("abcabcabc", SamplingParams(**fields))
    answer = server.complete("abcabcabc", **fields).json()
    assert [c["text"] for c in answer["choices"]] == [c.text for c in expected]
    assert [c["finish_reason"] for c in answer["choices"]] == [c.finish_reason for c in expected]
    assert [c["index"] for c in answer["choices"]] == list(range(len(expected)))
    streamed = server.texts(TEXT, prompt="abcabcabc", **fields)
    assert streamed == [c.text for c in expected]


def test_logit_bias_takes_ids_as_text(server: Server) -> None:
    bias = {str(ord("z")): 100.0}
    text = server.complete("abc", temperature=0, max_tokens=4, logit_bias=bias).json()["choices"][0]["text"]
    assert text == "zzzz"


def test_the_default_temperature_is_1(server: Server) -> None:
    expected = server.library("abc", SamplingParams(seed=8, temperature=1.0, max_tokens=20))
    assert server.complete("abc", seed=8, max_tokens=20).json()["choices"][0]["text"] == expected[0].text


def test_max_completion_tokens_wins(server: Server) -> None:
    usage = server.chat("x", max_tokens=3, max_completion_tokens=5, ignore_eos=True, seed=1).json()["usage"]
    assert usage["completion_tokens"] == 5


def test_without_a_limit_a_chat_may_fill_the_context(server: Server) -> None:
    answer = server.chat("x", ignore_eos=True, temperature=0).json()
    assert answer["usage"]["total_tokens"] == 512
    assert answer["choices"][0]["finish_reason"] == "length"


def test_a_completion_has_16_tokens_by_default(server: Server) -> None:
    assert server.complete("x", ignore_eos=True).json()["usage"]["completion_tokens"] == 16


def test_a_streamed_chat_begins_with_the_role_and_ends_with_the_usage(server: Server) -> None:
    fields = {"messages": chat_of("hello"), "seed": 2, "max_tokens": 30, "n": 2}
    events = server.events(CHAT, **fields, stream_options={"include_usage": True})
    whole = server.post(CHAT, **fields).json()
    *pieces, last = events
    for index in range(2):
        own = [e["choices"][0] for e in pieces if e["choices"][0]["index"] == index]
        assert own[0]["delta"]["role"] == "assistant"
        assert all("role" not in piece["delta"] for piece in own[1:])
        assert "".join(p["delta"]["content"] for p in own) == whole["choices"][index]["message"]["content"]
        assert [p["finish_reason"] for p in own][:-1] == [None] * (len(own) - 1)
        assert own[-1]["finish_reason"] == whole["choices"][index]["finish_reason"]
    assert all(event["usage"] is None for event in pieces)
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]
    assert len({event["id"] for event in events}) == 1
    assert {event["object"] for event in events} == {"chat.completion.chunk"}


def test_without_include_usage_there_is_none(server: Server) -> None:
    events = server.events(CHAT, messages=chat_of("hello"), max_tokens=4)
    assert all("usage" not in event and event["choices"] for event in events)


def test_several_prompts_as_text_and_as_ids(server: Server) -> None:
    texts = ["abcabc", "xyzxyz"]
    params = SamplingParams(seed=3, max_tokens=12, n=2)
    expected = [c.text for text in texts for c in server.library(text, params)]
    fields = {"seed": 3, "max_tokens": 12, "n": 2}
    for prompt in (texts, [list(text.encode()) for text in texts]):
        answer = server.complete(prompt, **fields).json()
        assert [c["text"] for c in answer["choices"]] == expected
        assert answer["usage"]["prompt_tokens"] == 12
        assert server.texts(TEXT, prompt=prompt, **fields) == expected


def test_echo_repeats_the_prompt(server: Server) -> None:
    fields = {"prompt": ["ab", "cd"], "echo": True, "seed": 1, "max_tokens": 5}
    plain = server.post(TEXT, **{**fields, "echo": False}).json()["choices"]
    answer = server.post(TEXT, **fields).json()["choices"]
    assert [c["text"] for c in answer] == ["ab" + plain[0]["text"], "cd" + plain[1]["text"]]
    assert server.texts(TEXT, **fields) == [c["text"] for c in answer]


def test_content_in_parts_and_the_developers_role(server: Server) -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}]
    plain = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "one\ntwo"}]
    answers = [server.post(CHAT, messages=m, seed=1, max_tokens=8).json() for m in (messages, plain)]
    assert answers[0]["choices"] == answers[1]["choices"]
    assert answers[0]["usage"] == answers[1]["usage"]


def test_token_ids_where_asked_for(server: Server) -> None:
    fields = {"seed": 1, "max_tokens": 9, "return_token_ids": True}
    (expected,) = server.library("abc", SamplingParams(seed=1, max_tokens=9))
    (choice,) = server.complete("abc", **fields).json()["choices"]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([97, 98, 99], list(expected.token_ids))
    events = server.events(TEXT, prompt="abc", **fields)
    assert [t for e in events for t in e["choices"][0]["token_ids"]] == list(expected.token_ids)


def test_unknown_fields_are_tolerated(server: Server) -> None:
    answer = server.chat("x", max_tokens=2, user="me", store=True, metadata={"a": "b"}, frobnicate=7)
    assert answer.status_code == 200


def test_nulls_are_defaults(server: Server) -> None:
    names = [
        "model",
        "stream",
        "stream_options",
        "n",
        "temperature",
        "top_p",
        "seed",
        "stop",
        "logit_bias",
        "user",
        "prediction",
        "speculation",
    ]
    given = {**dict.fromkeys(names), "max_tokens": 3}
    assert server.chat("x", **given).status_code == 200


def test_the_usage_tells_what_was_cached() -> None:
    def cached(server: Server, **fields: Any) -> int:
        usage = server.post(TEXT, max_tokens=2, **fields).json()["usage"]
        events = server.events(TEXT, max_tokens=2, stream_options={"include_usage": True}, **fields)
        assert events[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] >= 64
        assert usage["prompt_tokens_details"]["cached_tokens"] <= usage["prompt_tokens"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    with running_server() as server:
        assert cached(server, prompt="x" * 70, n=3) == 0  # its own choices share it, but it was new
        assert cached(server, prompt="x" * 64 + "y" * 64) == 64
        assert cached(server, prompt=["x" * 70, "x" * 64 + "y" * 64 + "z", "z" * 70], n=2) == 64 + 128
