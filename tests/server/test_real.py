"""The whole server on real weights: `foredraft serve smollm2-135m` through the `openai` package."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Timer
from typing import Any

import pytest
from openai import OpenAI

from foredraft import LLM, SamplingParams

MODEL = "smollm2-135m"
PATIENCE = 300.0

pytestmark = pytest.mark.real

QUESTIONS = [
    "Name three primes.",
    "Repeat this text twice: the quick brown fox jumps over the lazy dog.",
    "Translate 'good morning' into French.",
    "Write a haiku about the sea. Use emoji.",
    "What is the capital of Italy?",
    "Count from one to ten.",
]


@pytest.fixture(scope="module")
def client() -> Iterator[OpenAI]:
    process = subprocess.Popen(
        [sys.executable, "-m", "foredraft", "serve", MODEL, "--port", "0", "-c", "1024", "--no-adaptive"],
        stderr=subprocess.PIPE,
        text=True,
        env=dict(os.environ),
    )
    timer = Timer(PATIENCE, process.kill)
    timer.start()
    assert process.stderr is not None
    with process.stderr:
        url = next(match[1] for line in process.stderr if (match := re.search(r"ready: (http://\S+)", line)))
        with OpenAI(base_url=url, api_key="none", timeout=PATIENCE, max_retries=0) as made:
            yield made
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
    timer.cancel()


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(MODEL, max_model_len=1024) as made:
        yield made


@pytest.mark.parametrize("fields", [{"temperature": 0.0}, {"temperature": 0.9, "top_p": 0.95, "seed": 7}], ids=str)
def test_all_at_once_equals_the_library_one_by_one(client: OpenAI, llm: LLM, fields: dict[str, Any]) -> None:
    def ask(question: str) -> str:
        messages: list[Any] = [{"role": "user", "content": question}]
        if len(question) % 2:
            answer = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=48, **fields)
            return answer.choices[0].message.content or ""
        with client.chat.completions.create(
            model=MODEL, messages=messages, max_tokens=48, stream=True, **fields
        ) as stream:
            return "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    with ThreadPoolExecutor(len(QUESTIONS)) as pool:
        answers = list(pool.map(ask, QUESTIONS))
    params = SamplingParams(max_tokens=48, **fields)
    alone = [llm.chat([{"role": "user", "content": question}], params)[0].text for question in QUESTIONS]
    assert answers == alone


def test_a_prediction_is_accepted(client: OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "Count from one to ten."}]
    fields: dict[str, Any] = {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 40}
    first = client.chat.completions.create(**fields).choices[0].message.content
    answer = client.chat.completions.create(**fields, prediction={"type": "content", "content": first})
    assert answer.choices[0].message.content == first
    details = answer.usage.completion_tokens_details
    assert details.accepted_prediction_tokens > 0
