"""Streams: what they add up to, and that their events' sizes tell nothing where that is asked for."""

from __future__ import annotations

from typing import Any

import pytest

from foredraft.types import SamplingParams
from tests.server.serving import Server, running_server

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HELLO = [{"role": "user", "content": "hello"}]


def raw_events(server: Server, **fields: Any) -> list[bytes]:
    body = {"messages": HELLO, "seed": 1, "max_tokens": 40, "ignore_eos": True, "stream": True, **fields}
    with server.client.stream("POST", CHAT, json=body) as response:
        return response.read().split(b"\n\n")[:-2]


def test_streamed_text_is_blocking_text_for_many_seeds(server: Server) -> None:
    for seed in range(12):
        fields = {"prompt": "abab", "seed": seed, "max_tokens": 60, "stop": ["ba", "\ufffd\ufffd"], "n": 2}
        whole = server.post(TEXT, **fields).json()["choices"]
        assert server.texts(TEXT, **fields) == [choice["text"] for choice in whole]


def test_characters_of_several_tokens_come_whole(server: Server) -> None:
    """The model's tokens are bytes: an emoji takes four of them."""
    emoji = "\N{GRINNING FACE}"
    bias = dict.fromkeys(emoji.encode(), 100.0)
    for seed in range(8):
        params = SamplingParams(seed=seed, max_tokens=40, logit_bias=bias, ignore_eos=True)
        (expected,) = server.library(emoji, params)
        fields = {"prompt": emoji, "seed": seed, "max_tokens": 40, "logit_bias": bias, "ignore_eos": True}
        assert server.texts(TEXT, **fields) == [bytes(expected.token_ids).decode("utf-8", "replace")]
        assert server.post(TEXT, **fields).json()["choices"][0]["text"] == expected.text


@pytest.mark.parametrize("padding", [64, 256, 1000])
def test_padding_makes_sizes_equal(padding: int) -> None:
    with running_server(stream_padding=padding) as server:
        events = raw_events(server)
        assert events
        assert all((len(event) + 2) % padding == 0 for event in events)
        if padding == 1000:  # more than any event
            assert len({len(event) for event in events[:-1]}) == 1
        unpadded = raw_events(server, stream_options={"include_obfuscation": False})
        assert any((len(event) + 2) % 256 for event in unpadded)


def test_a_client_may_ask_for_padding(server: Server) -> None:
    padded = raw_events(server, stream_options={"include_obfuscation": True})
    assert all((len(event) + 2) % 256 == 0 for event in padded)


@pytest.mark.parametrize("interval", [1, 7, 100])
def test_an_interval_gathers_tokens(interval: int) -> None:
    fields = {"prompt": "abc", "seed": 2, "max_tokens": 60, "ignore_eos": True, "return_token_ids": True, "logprobs": 0}
    with running_server(stream_interval=interval) as server:
        events = server.events(TEXT, **fields)
        whole = server.post(TEXT, **fields).json()["choices"][0]
        counts = [len(event["choices"][0]["token_ids"]) for event in events]
        assert sum(counts) == 60
        assert all(count >= interval for count in counts[1:-1])
        assert "".join(event["choices"][0]["text"] for event in events) == whole["text"]
        logprobs = [p for event in events for p in event["choices"][0]["logprobs"]["token_logprobs"]]
        assert logprobs == whole["logprobs"]["token_logprobs"]


def test_origins_and_the_sum_of_speculation(server: Server) -> None:
    fields = {"prompt": "abcabcabcabc", "temperature": 0, "max_tokens": 60, "ignore_eos": True}
    (expected,) = server.library("abcabcabcabc", SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
    asked = {**fields, "speculation": {"origins": True}}
    whole = server.post(TEXT, **asked).json()
    own = whole["choices"][0]["speculation"]
    assert own["origins"] == list(expected.origins)
    assert len(own["tokens"]) == 60
    assert whole["speculation"]["num_accepted_tokens"] == expected.speculation.num_accepted_tokens > 0
    assert whole["speculation"]["accepted_per_position"] == list(expected.speculation.accepted_per_position)
    *pieces, last = server.events(TEXT, **asked)
    assert [o for piece in pieces for o in piece["speculation"]["origins"]] == own["origins"]
    assert [t for piece in pieces for t in piece["speculation"]["tokens"]] == own["tokens"]
    drafted = sum(piece["speculation"]["num_draft_tokens"] for piece in pieces)
    assert drafted == last["speculation"]["num_draft_tokens"] == expected.speculation.num_draft_tokens
    assert last["choices"] == []
    assert last["speculation"] == whole["speculation"]
    *others, end = server.events(TEXT, **fields)
    assert all("speculation" not in event for event in others)
    assert end["speculation"] == whole["speculation"]


def test_speculation_is_the_clients_to_switch_off_and_to_bound(server: Server) -> None:
    fields = {"prompt": "abcabcabcabc", "temperature": 0, "max_tokens": 60, "ignore_eos": True}
    plain = server.post(TEXT, **fields, speculation={"enabled": False}).json()
    without = server.post(TEXT, **fields, speculation={"drafters": []}).json()
    named = server.post(TEXT, **fields, speculation={"drafters": ["ngram"]}).json()
    short = server.post(TEXT, **fields, speculation={"num_speculative_tokens": 1}).json()
    usual = server.post(TEXT, **fields).json()
    assert plain["speculation"]["num_drafts"] == without["speculation"]["num_drafts"] == 0
    assert set(named["speculation"]["by_drafter"]) == {"ngram"}
    assert len(short["speculation"]["accepted_per_position"]) == 1
    assert len(usual["speculation"]["accepted_per_position"]) > 1
    assert plain["choices"] == without["choices"] == short["choices"] == named["choices"] == usual["choices"]


def test_a_prediction_is_drafted_from_and_counted(server: Server) -> None:
    letters_only = {id: -100.0 for id in range(272) if not 97 <= id <= 122}
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True, logit_bias=letters_only)
    (expected,) = server.library("abc", params)
    guess = "".join("?" if i % 12 == 11 else letter for i, letter in enumerate(expected.text))
    fields = {"prompt": "abc", "temperature": 0, "max_tokens": 60, "ignore_eos": True, "logit_bias": letters_only}
    asked = {**fields, "prediction": {"type": "content", "content": [{"type": "text", "text": guess}]}}
    answer = server.post(TEXT, **asked).json()
    assert answer["choices"][0]["text"] == expected.text
    counts = answer["speculation"]["by_drafter"]["prediction"]
    details = answer["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] == counts["accepted_tokens"] > 10
    assert details["rejected_prediction_tokens"] == counts["draft_tokens"] - counts["accepted_tokens"] > 0
    *_, last = server.events(TEXT, **asked, stream_options={"include_usage": True})
    assert last["usage"] == answer["usage"]
    without = server.post(TEXT, **fields).json()["usage"]["completion_tokens_details"]
    assert without == {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}
