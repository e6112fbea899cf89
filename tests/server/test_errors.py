"""What cannot be done is told in OpenAI's form: the right status, the cause, and the field that is to blame."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from pydantic import BaseModel, ValidationError

from foredraft.errors import EngineFailedError
from foredraft.server.protocol import ChatCompletionRequest, CompletionRequest, DetokenizeRequest
from tests.server.serving import Server, make_generator, running_server

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"n": True}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": -3}, "max_completion_tokens"),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"min_p": 2}, "min_p"),
        ({"seed": 10**30}, "seed"),
        ({"stop": [""]}, "stop[0]"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"logit_bias": {"hello": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 1000}}, "logit_bias"),
        ({"logit_bias": {"100000": 1}}, "logit_bias"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [*HELLO, {"role": "robot", "content": "x"}]}, "messages[1].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}, "messages[0].tool_calls[0].function"),
        ({"speculation": {"enabled": "no"}}, "speculation.enabled"),
        ({"speculation": {"length": 3}}, "speculation.length"),
        ({"speculation": {"drafters": ["nobody"]}}, "speculation.drafters"),
        ({"speculation": {"num_speculative_tokens": 65}}, "speculation.num_speculative_tokens"),
        ({"prediction": {"type": "guess", "content": "x"}}, "prediction.type"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"bad_words": ["x"]}, "bad_words"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"suffix": "x"}, "suffix"),
        ({"guided_json": {"type": "object"}}, "guided_json"),
    ],
    ids=str,
)
def test_an_impossible_value_is_named(server: Server, fields: dict[str, Any], param: str) -> None:
    for stream in (False, True):
        error = error_of(server.post(CHAT, **{"messages": HELLO, **fields, "stream": stream}), 400)
        assert error["param"] == param
        assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": [1, 100000]}, "prompt"),
        ({"prompt": [1, -1]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({}, "prompt"),
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": "x", "best_of": 3}, "best_of"),
        ({"prompt": "x", "echo": True, "logprobs": 1}, "echo"),
        ({"prompt": "x", "logprobs": 50}, "logprobs"),
    ],
    ids=str,
)
def test_an_impossible_completion_is_named(server: Server, fields: dict[str, Any], param: str) -> None:
    assert error_of(server.post(TEXT, **fields), 400)["param"].startswith(param)


@pytest.mark.parametrize("name", ["json", "regex", "choice", "grammar"])
@pytest.mark.parametrize(("path", "prompt"), [(CHAT, {"messages": HELLO}), (TEXT, {"prompt": "x"})])
def test_a_name_that_vllm_gave_up_comes_with_the_new_one(
    server: Server, name: str, path: str, prompt: dict[str, Any]
) -> None:
    error = error_of(server.post(path, **prompt, **{f"guided_{name}": "x"}), 400)
    assert error["param"] == f"guided_{name}"
    assert error["message"].endswith(f"use structured_outputs.{name}")


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "video_url", "file"])
def test_an_image_is_refused_and_text_goes_on(server: Server, kind: str) -> None:
    parts = [{"type": "text", "text": "what is this?"}, {"type": kind, kind: {"url": "data:image/png;base64,AAAA"}}]
    error = error_of(server.post(CHAT, messages=[{"role": "user", "content": parts}]), 400)
    assert error["param"] == "messages[0].content[1]"
    wanted = "takes text only" if kind == "image_url" else f"is of type {kind!r}, which no model here reads"
    assert wanted in error["message"]
    assert server.chat("hello", max_tokens=2).status_code == 200


@pytest.mark.parametrize("length", [512, 600, 5000])
def test_a_prompt_that_is_too_long(server: Server, length: int) -> None:
    for response, param in ((server.complete("x" * length), "prompt"), (server.chat("x" * length), "messages")):
        error = error_of(response, 400)
        assert error["param"] == param
        assert error["code"] == "context_length_exceeded"
        assert "shorten the prompt" in error["message"]


def test_a_prompt_that_leaves_room_for_one_token(server: Server) -> None:
    answer = server.complete("x" * 511, max_tokens=50, ignore_eos=True).json()
    assert answer["usage"]["completion_tokens"] == 1
    assert answer["choices"][0]["finish_reason"] == "length"


def test_a_model_that_is_not_here(server: Server) -> None:
    for path, fields in ((CHAT, {"messages": HELLO}), (TEXT, {"prompt": "x"}), ("/tokenize", {"prompt": "x"})):
        error = error_of(server.post(path, model="gpt-9\ud800", **fields), 404)
        assert (error["param"], error["code"]) == ("model", "model_not_found")
        assert "served: tiny" in error["message"]
    error_of(server.client.get("/v1/models/gpt-9"), 404)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"\xff\xfe{}",
        b"[" * 100_000,
        b'{"messages": ' + b"[" * 5_000,
        b'{"prompt": "x", "seed": ' + b"9" * 5_000 + b"}",
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": 1e999}',
        b'{"prompt": "x", "max_tokens": 1e3}',
        b'{"prompt": "x", "logit_bias": {"' + b"1" * 5_000 + b'": 1}}',
    ],
    ids=lambda body: repr(body[:30]),
)
def test_a_malformed_body(server: Server, body: bytes) -> None:
    headers = {"content-type": "application/json"}
    error_of(server.client.post(TEXT, content=body, headers=headers), 400)


def test_a_body_that_does_not_say_it_is_json(server: Server) -> None:
    for headers in ({"content-type": "text/plain"}, {"content-type": "application/x-www-form-urlencoded"}, {}):
        error = error_of(server.client.post(TEXT, content=b'{"prompt": "x"}', headers=headers), 400)
        assert "content-type: application/json" in error["message"]


def test_text_that_is_no_unicode_is_replaced(server: Server) -> None:
    answer = server.complete("a\ud800", echo=True, max_tokens=1, user="\udfff")
    assert answer.json()["choices"][0]["text"][:2] in ("a?", "a\ufffd")
    assert server.chat("\ud800", max_tokens=1).status_code == 200
    error_of(server.chat("x", stop=["\ud800"]), 400)  # no text has it


def test_unknown_paths_and_methods(server: Server) -> None:
    assert error_of(server.client.get("/v2/nothing"), 404)["code"] == "not_found"
    response = server.client.get(CHAT)
    assert error_of(response, 405)["code"] == "method_not_allowed"
    assert response.headers["allow"] == "POST"


def test_an_engine_that_breaks_down_fails_every_request_and_says_so() -> None:
    generator = make_generator()
    with running_server(generator) as server:
        assert server.client.get("/health").status_code == 200
        generator.engine.model = None  # type: ignore[assignment]
        error = error_of(server.chat("x"), 500)
        assert "broke down (AttributeError); restart the server" in error["message"]
        assert server.client.get("/health").status_code == 503
        assert server.client.get("/health").json() == {"status": "failed"}
        assert server.client.get("/live").status_code == 200
        assert server.client.get("/metrics").status_code == 200
        error_of(server.chat("x"), 500)
        error_of(server.client.get("/v1/models"), 500)


def test_the_log_has_the_cause(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fail(*_: object) -> None:
        raise EngineFailedError("rank 1 of 2 has ended")

    generator = make_generator()
    with running_server(generator) as server:
        monkeypatch.setattr(generator.engine.model, "forward", fail)
        error_of(server.chat("x"), 500)
    assert "the engine broke down: rank 1 of 2 has ended" in caplog.messages


def test_a_stream_of_an_engine_that_breaks_down_ends_with_the_error() -> None:
    generator = make_generator()
    with running_server(generator) as server:
        events = []
        fields = {"prompt": "abc", "ignore_eos": True, "max_tokens": 300, "stream": True}
        with server.client.stream("POST", TEXT, json=fields) as response:
            for line in response.iter_lines():
                generator.engine.model = None  # type: ignore[assignment]
                events += [line] if line else []
        assert events[-1] == "data: [DONE]"
        assert '"error"' in events[-2]
        assert "broke down" in events[-2]


@pytest.mark.parametrize("depth", [300, 500, 800, 2000])
def test_nesting_beyond_reason_is_the_request_s_fault(server: Server, depth: int) -> None:
    nested = "[" * depth + "]" * depth
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": nested}}
    answer = server.client.post(
        CHAT, json={"messages": [*HELLO, {"role": "assistant", "tool_calls": [call]}], "max_tokens": 1}
    )
    assert answer.status_code in (200, 400)
    body = '{"messages": [{"role": "user", "content": "a", "x": ' + nested + '}], "max_tokens": 1}'
    answer = server.client.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert answer.status_code in (200, 400)


@pytest.mark.parametrize(
    ("request_type", "body"),
    [
        (CompletionRequest, {"prompt": ["", 1.5] * 1000}),
        (CompletionRequest, {"prompt": [[1.5] * 1000] * 100}),
        (ChatCompletionRequest, {"messages": [{}] * 1000}),
        (ChatCompletionRequest, {"messages": [{"role": "user", "content": [{}] * 1000}]}),
        (DetokenizeRequest, {"tokens": ["a"] * 1000}),
    ],
)
def test_a_long_list_of_mistakes_ends_with_the_first(request_type: type[BaseModel], body: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        request_type.model_validate(body)
    assert caught.value.error_count() < 10
