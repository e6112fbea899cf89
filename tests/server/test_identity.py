"""Many different texts at once, in a cache too small for them, are those that the library writes one by one."""

from __future__ import annotations

import json
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from foredraft import LLM
from foredraft.cli.main import run
from foredraft.testing import make_tiny_gguf
from foredraft.types import SamplingParams
from tests.server.serving import PATIENCE, Server, running_server
from tests.server.test_limits import eventually, is_idle

NUM_TEXTS = 32
NUM_TOKENS = 90
WAYS = {"greedy": {"temperature": 0.0}, "seeded": {"temperature": 0.8, "seed": 7}}
QUESTIONS = [f"{'What is ' * (i % 5)}number {i}, {'and why ' * (i % 3)}is it so?" for i in range(NUM_TEXTS)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target, and a draft that is often wrong."""
    directory = tmp_path_factory.mktemp("models")
    make_tiny_gguf("llama", directory / "target.gguf")
    make_tiny_gguf("llama", directory / "draft.gguf", tensor_type="Q4_0")
    return directory / "target.gguf", directory / "draft.gguf"


def metric(server: Server, name: str) -> float:
    """Over all labels."""
    text = server.client.get("/metrics").text
    return sum(map(float, re.findall(rf"^foredraft:{name}\{{.*\}} (\S+)$", text, re.M)))


def ask(server: Server, number: int, fields: dict[str, Any]) -> str:
    """Chats and texts, streamed and not, by turns."""
    question = QUESTIONS[number]
    fields = {**fields, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    if number % 4 == 0:
        text: str = server.chat(question, **fields).json()["choices"][0]["message"]["content"]
    elif number % 4 == 1:
        [text] = server.texts("/v1/completions", prompt=question, **fields)
    elif number % 4 == 2:
        text = server.complete(question, **fields).json()["choices"][0]["text"]
    else:
        messages = [{"role": "user", "content": question}]
        events = server.events("/v1/chat/completions", messages=messages, **fields)
        text = "".join(event["choices"][0]["delta"].get("content") or "" for event in events)
    return text


@pytest.mark.parametrize("way", WAYS)
def test_at_once_one_by_one_the_library_and_the_command_agree(
    models: tuple[Path, Path], way: str, capfd: pytest.CaptureFixture[str]
) -> None:
    target, draft = models
    with LLM(target, "none", max_model_len=256) as plain:
        params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, **WAYS[way])  # type: ignore[arg-type]
        expected = [
            (
                plain.generate(text, params)
                if i % 4 in (1, 2)
                else plain.chat([{"role": "user", "content": text}], params)
            )
            for i, text in enumerate(QUESTIONS)
        ]
    engine: Any = LLM(
        target, f"ngram+model:{draft}", max_model_len=256, kv_cache_tokens=512, max_num_seqs=16, adaptive=False
    )
    engine.gate = threading.Event()  # as the server of these tests expects it
    with running_server(engine) as server, ThreadPoolExecutor(NUM_TEXTS) as pool:
        together = list(pool.map(lambda number: ask(server, number, WAYS[way]), range(NUM_TEXTS), timeout=PATIENCE))
        assert metric(server, "num_preemptions_total") > 0
        assert metric(server, "spec_decode_num_draft_tokens_total") > metric(server, "spec_decode_num_drafts_total") > 0
        assert eventually(lambda: is_idle(server))
        assert server.engine.snapshot().kv_cache_usage == 0
        alone = [ask(server, number, WAYS[way]) for number in range(NUM_TEXTS)]
    assert len(set(together)) == NUM_TEXTS
    assert together == alone == [completion.text for [completion] in expected]
    flags = [word for name, value in WAYS[way].items() for word in (f"--{name}", str(value))]
    for number in (0, 3):
        capfd.readouterr()
        command = ["generate", "-m", str(target), "-d", "none", "-c", "256", "-p", QUESTIONS[number], "--ignore-eos"]
        assert run([*command, "-n", str(NUM_TOKENS), *flags, "--json"]) == 0
        assert json.loads(capfd.readouterr().out)["text"] == together[number]
