"""Half an hour of everything at once, in a few seconds; and servers that it must not let pass."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from foredraft.drafters.ngram import NgramDrafter
from foredraft.testing import ByteTokenizer, TinyModel, make_tiny_gguf
from foredraft.types import Chunk
from tests.server.serving import GatedGenerator, running_server
from tests.server.test_structured import TEMPLATE

ROOT = Path(__file__).parent.parent.parent
PATIENCE_S = 300.0


def soak(target: str, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.soak", target, *flags]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)


def test_everything_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREDRAFT_HOME", str(tmp_path / "home"))
    make_tiny_gguf("llama", tmp_path / "tiny.gguf")
    done = soak(str(tmp_path / "tiny.gguf"), "--minutes", "0.3", "--only", "long|seeded|eight|schema|logprobs|context")
    assert done.returncode == 0, done.stderr
    assert "0 faults" in done.stdout
    counts = dict(re.findall(r"'(\w+)': (\d+)", done.stdout))
    assert "wrong" not in counts
    for name in ("compared", "slow", "refused", "left", "killed", "nonsense", "num_preemptions_total"):
        assert int(counts[name]) > 0, name


class TellsOthersTexts(GatedGenerator):
    """Where several run, a text may get a letter that is not its own."""

    def step(self) -> list[Chunk]:
        several = self.snapshot().num_running > 4
        return [replace(chunk, text="x" + chunk.text[1:]) if several else chunk for chunk in super().step()]


class LosesBlocks(GatedGenerator):
    """A client that leaves costs a block of the cache."""

    def abort(self, request_id: int) -> None:
        super().abort(request_id)
        self.engine.pool.allocate(1)


def start(kind: type[GatedGenerator], template: str | None = None) -> GatedGenerator:
    model, tokenizer = TinyModel(vocab_size=272, max_model_len=512, num_blocks=160, kinship=8.0), ByteTokenizer()
    tokenizer.chat_template = template or tokenizer.chat_template
    return kind(model, tokenizer, [NgramDrafter()], adaptive=False, native=False)


@pytest.mark.parametrize(
    ("kind", "words"),
    [(TellsOthersTexts, "'text': 'x"), (LosesBlocks, "not idle at the end|the engine broke down")],  # if idle before
    ids=["texts", "blocks"],
)
def test_faults_are_found(kind: type[GatedGenerator], words: str) -> None:
    with running_server(start(kind)) as server:
        done = soak(server.url, "--minutes", "0.1", "--only", "greedy", "--clients", "24")
    assert done.returncode == 1, done.stdout
    assert re.search(words, done.stderr)


def test_calls_of_tools() -> None:
    with running_server(start(GatedGenerator, TEMPLATE)) as server:
        done = soak(server.url, "--minutes", "0.1", "--only", "call", "--clients", "24")
    assert done.returncode == 0, done.stderr
    assert "2 requests asked one by one, 2 answered" in done.stdout
    assert re.search(r"'compared': [1-9]", done.stdout)
