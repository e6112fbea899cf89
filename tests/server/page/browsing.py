"""A server that talks without end, a page watched, and what tests do on it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, Route, expect

from foredraft.drafters.ngram import NgramDrafter
from foredraft.engine.async_engine import AsyncEngine
from foredraft.testing import ByteTokenizer, TinyModel
from foredraft.types import Chunk
from tests.server.serving import GatedGenerator, running_server

KEY = "a-secret"

#: Run in the page, each tells what is wrong there.
LABEL_FAULTS = (Path(__file__).parent / "label_faults.js").read_text()
CONTRAST_FAULTS = (Path(__file__).parent / "contrast_faults.js").read_text()


class PausingGenerator(GatedGenerator):
    """Closes its own gate before the step `pause_at`: an answer is then in the middle, for as long as a test wants."""

    pause_at = -1

    def step(self) -> list[Chunk]:
        if self.num_steps == self.pause_at:
            self.gate.clear()
        return super().step()

    def pause_after(self, num_steps: int) -> None:
        self.pause_at = self.num_steps + num_steps

    def resume(self) -> None:
        self.pause_at = -1
        self.gate.set()


def make_talkative() -> PausingGenerator:
    """Answers in letters, and without end."""
    model = TinyModel(vocab_size=272, max_model_len=2048, num_blocks=160, kinship=8.0)
    model.limit_head(b"abcdefghijklmnopqrstuvwxyz ")
    return PausingGenerator(model, ByteTokenizer(), [NgramDrafter()], adaptive=False, native=False)


@dataclass(frozen=True)
class TalkativeServer:
    url: str
    engine: AsyncEngine
    generator: PausingGenerator


@contextmanager
def running(**settings: Any) -> Iterator[TalkativeServer]:
    generator = make_talkative()
    with running_server(generator, **settings) as server:
        yield TalkativeServer(server.url, server.engine, generator)


@dataclass
class Watched:
    """A page, and all that must not happen on it."""

    page: Page
    base: str
    expected: str  # part of what Chromium itself writes about a refused request
    complaints: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.on("console", lambda message: self._hear(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self._check_url(request.url))

    def _hear(self, text: str) -> None:
        if not self.expected or self.expected not in text:
            self.complaints.append(text)

    def _check_url(self, url: str) -> None:
        if not url.startswith(self.base):
            self.complaints.append(f"asked for {url}")


Opener = Callable[..., Page]


def script(page: Page, chunks: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The next chats get these chunks. Returns the bodies that the page will have sent."""
    sent: list[dict[str, Any]] = []

    def answer(route: Route) -> None:
        sent.append(json.loads(route.request.post_data or ""))
        lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
        route.fulfill(body="".join([*lines, "data: [DONE]\n\n"]), content_type="text/event-stream")

    page.route("**/v1/chat/completions", answer)
    return sent


def chunk(content: str, tokens: Sequence[str], origins: Sequence[str], drafted: int = 0) -> dict[str, Any]:
    speculation = {"tokens": tokens, "origins": origins, "num_draft_tokens": drafted}
    return {"choices": [{"index": 0, "delta": {"content": content}}], "speculation": speculation}


END = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}


def ask(page: Page, text: str) -> None:
    page.get_by_label("Message").fill(text)
    page.get_by_role("button", name="Send").click()


def wait_for_answers(page: Page, count: int = 1) -> None:
    expect(page.locator("article[aria-busy=false]")).to_have_count(count)


def tokens_of(page: Page) -> list[tuple[str, str]]:
    """(text, origin) of every token shown."""
    pairs = page.locator(".token").evaluate_all("nodes => nodes.map(n => [n.textContent, n.dataset.origin])")
    return [(text, origin) for text, origin in pairs]


def figure(page: Page, name: str) -> str:
    return page.locator(f".numbers .{name}").first.inner_text()
