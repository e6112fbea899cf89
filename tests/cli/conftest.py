from __future__ import annotations

import io
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from threading import Timer

import pytest
from tests.models.eyes import TEMPLATE as SEEING_TEMPLATE
from tests.models.eyes import Eyes

from foredraft.cli.console import Session
from foredraft.cli.options import EngineOptions
from foredraft.drafters.ngram import NgramDrafter
from foredraft.engine.generator import Generator, Prompt
from foredraft.testing import ByteTokenizer, TinyModel, make_tiny_gguf
from foredraft.types import Chunk, SamplingParams

#: A child that is not done by then is killed, which ends every read of its pipes.
CHILD_DEADLINE_S = 60.0


class TinyLLM(Generator):
    """What `open_llm` gives, without files: a model whose text repeats itself, and its n-gram drafter."""

    def __init__(self, options: EngineOptions, tokenizer: ByteTokenizer) -> None:
        model = TinyModel(vocab_size=272, max_model_len=512, num_blocks=160, kinship=8.0)
        drafters = [] if options.drafter == "none" else [NgramDrafter()]
        super().__init__(model, tokenizer, drafters, adaptive=False, native=False, load_s=0.25)
        self.options = options
        self.prompts: list[Prompt | Sequence[Prompt]] = []
        self.requests: list[SamplingParams | None] = []

    def stream(self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | None = None) -> Iterator[Chunk]:
        self.prompts.append(prompts)
        self.requests.append(params)
        return super().stream(prompts, params)


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> list[TinyLLM]:
    """Commands open tiny models; the list gets each as it is opened.

    The model `templateless` has no chat template, `seeing` takes images.
    """
    opened: list[TinyLLM] = []

    def open_tiny(options: EngineOptions, session: Session, *, chats: bool = False) -> TinyLLM:
        tokenizer = ByteTokenizer()
        if options.model == "templateless":
            monkeypatch.setattr(tokenizer, "chat_template", None)
        if options.model == "seeing":
            monkeypatch.setattr(tokenizer, "chat_template", SEEING_TEMPLATE)
        opened.append(TinyLLM(options, tokenizer))
        opened[-1].images = Eyes() if options.model == "seeing" else None
        return opened[-1]

    for command in ("generate", "chat", "demo"):
        monkeypatch.setattr(f"foredraft.cli.{command}.open_llm", open_tiny)
    return opened


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real (tiny) GGUF file."""
    path = tmp_path_factory.mktemp("models") / "tiny.gguf"
    make_tiny_gguf("llama", path)
    return path


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own, and no network."""
    monkeypatch.setenv("FOREDRAFT_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("FOREDRAFT_OFFLINE", "1")
    return tmp_path / "home"


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch) -> Callable[[bytes], None]:
    """Puts bytes on standard input."""
    return lambda data: monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts `foredraft ARGS` as a terminal does: Ctrl-C reaches it even where these tests inherited it as ignored."""
    children: list[tuple[subprocess.Popen[bytes], Timer]] = []

    def start_child(*args: object, stdin: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
        child = subprocess.Popen(
            [sys.executable, "-m", "foredraft", *map(str, args)],
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        timer = Timer(CHILD_DEADLINE_S, child.kill)
        timer.start()
        children.append((child, timer))
        return child

    yield start_child
    for child, timer in children:
        timer.cancel()
        child.kill()
        child.wait()
