"""The `openai` package as people use it, against the server of a tiny model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from math import exp
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from foredraft.types import SamplingParams
from tests.server.serving import PATIENCE, Server, running_server

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
PROMPT = "<|user|>hello<|end|><|assistant|>"


@pytest.fixture(scope="module")
def locked() -> Iterator[Server]:
    with running_server(api_keys=("key",)) as running:
        yield running


@pytest.fixture(scope="module")
def client(locked: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{locked.url}/v1", api_key="key", timeout=PATIENCE, max_retries=0) as made:
        yield made


def expected(server: Server, **fields: Any) -> list[str]:
    ids = server.generator.tokenizer.encode(PROMPT, parse_special=True)
    return [c.text for c in server.library(ids, SamplingParams(**fields))]


def test_a_chat(client: OpenAI, locked: Server) -> None:
    answer = client.chat.completions.create(model="tiny", messages=HELLO, seed=1, max_completion_tokens=30, n=2)
    assert [c.message.content for c in answer.choices] == expected(locked, seed=1, max_tokens=30, n=2)
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.speculation["num_passes"] > 0  # type: ignore[attr-defined]


def test_a_streamed_chat(client: OpenAI, locked: Server) -> None:
    with client.chat.completions.create(
        model="tiny", messages=HELLO, seed=2, max_tokens=30, stream=True, stream_options={"include_usage": True}
    ) as stream:
        chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert [text] == expected(locked, seed=2, max_tokens=30)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage is not None


def test_a_stream_that_is_left_early_ends_its_request(client: OpenAI, locked: Server) -> None:
    with client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=400, stream=True) as stream:
        next(iter(stream))
    assert client.models.list().data[0].id == "tiny"
    assert [
        c.message.content
        for c in client.chat.completions.create(model="tiny", messages=HELLO, seed=3, max_tokens=9).choices
    ] == expected(locked, seed=3, max_tokens=9)


def test_many_at_once_are_each_what_they_are_alone(locked: Server) -> None:
    async def ask_all() -> list[str]:
        async with AsyncOpenAI(base_url=f"{locked.url}/v1", api_key="key", timeout=PATIENCE, max_retries=0) as client:

            async def ask(seed: int) -> str:
                if seed % 2:
                    answer = await client.completions.create(model="tiny", prompt="abab", seed=seed, max_tokens=40)
                    return answer.choices[0].text
                text = ""
                stream = await client.completions.create(
                    model="tiny", prompt="abab", seed=seed, max_tokens=40, stream=True
                )
                async for chunk in stream:
                    text += chunk.choices[0].text
                return text

            return await asyncio.gather(*map(ask, range(24)))

    alone = [locked.library("abab", SamplingParams(seed=seed, max_tokens=40))[0].text for seed in range(24)]
    assert asyncio.run(ask_all()) == alone


def test_logprobs_of_a_chat(client: OpenAI, locked: Server) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=HELLO, temperature=0, max_tokens=20, logprobs=True, top_logprobs=3
    )
    ids = locked.generator.tokenizer.encode(PROMPT, parse_special=True)
    (alone,) = locked.library(ids, SamplingParams(temperature=0, max_tokens=20, logprobs=3))
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert alone.logprobs is not None
    assert [entry.logprob for entry in logprobs.content] == [entry.logprob for entry in alone.logprobs]
    for entry in logprobs.content:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == max(top.logprob for top in entry.top_logprobs)  # greedy
        assert sum(exp(top.logprob) for top in entry.top_logprobs) <= 1.0001
        assert bytes(entry.bytes or []).decode("utf-8", "replace") == entry.token
    with client.chat.completions.create(
        model="tiny", messages=HELLO, temperature=0, max_tokens=20, logprobs=True, top_logprobs=3, stream=True
    ) as stream:
        streamed = [e for chunk in stream for e in (chunk.choices[0].logprobs.content if chunk.choices else [])]  # type: ignore[union-attr]
    assert streamed == logprobs.content


def test_logprobs_of_a_completion(client: OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt="abc", temperature=0, max_tokens=12, logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.top_logprobs is not None
    assert logprobs.text_offset is not None
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.text_offset) == 12
    for token, logprob, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert top[token] == logprob == max(top.values())
    assert logprobs.text_offset[0] == 0
    assert logprobs.text_offset == sorted(logprobs.text_offset)


def test_a_prediction(client: OpenAI, locked: Server) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=HELLO, seed=4, max_tokens=20, prediction={"type": "content", "content": "anything"}
    )
    assert [answer.choices[0].message.content] == expected(locked, seed=4, max_tokens=20)
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.accepted_prediction_tokens is not None
    assert answer.usage.completion_tokens_details.rejected_prediction_tokens is not None


def test_errors_are_the_packages_own(client: OpenAI, locked: Server) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=HELLO, temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-9", messages=HELLO)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="tiny", prompt="x" * 600)
    assert long.value.code == "context_length_exceeded"
    with (
        OpenAI(base_url=f"{locked.url}/v1", api_key="wrong", max_retries=0) as other,
        pytest.raises(openai.AuthenticationError),
    ):
        other.models.list()


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "foredraft"
