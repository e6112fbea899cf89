"""The page in headless Chromium, against the real server on a tiny model; where certain text matters it is scripted."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.request import urlopen

import pytest
from playwright.sync_api import Browser, Page, Route, expect, sync_playwright

from foredraft.drafters.ngram import NgramDrafter
from foredraft.engine.async_engine import AsyncEngine
from foredraft.server.web import MEDIA_TYPES
from foredraft.testing import ByteTokenizer, TinyModel
from foredraft.types import Chunk
from tests.server.serving import PATIENCE, GatedGenerator, running_server

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


@pytest.fixture(scope="module")
def server() -> Iterator[TalkativeServer]:
    with running() as server:
        yield server


@pytest.fixture(scope="module")
def locked_server() -> Iterator[TalkativeServer]:
    with running(api_keys=(KEY,)) as server:
        yield server


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Debian's Chromium, or else the one that `playwright install chromium` brings."""
    expect.set_options(timeout=PATIENCE * 1000)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"))
        yield browser
        browser.close()


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


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Opener]:
    """Opens the page; when the test ends, nothing may have been written to the console or asked of another host."""
    opened: list[Watched] = []

    def open_page(
        server: TalkativeServer, *, scheme: Literal["light", "dark"] = "light", width: int = 1000, expected: str = ""
    ) -> Page:
        context = browser.new_context(color_scheme=scheme, viewport={"width": width, "height": 720})
        context.set_default_timeout(PATIENCE * 1000)
        page = context.new_page()
        opened.append(Watched(page, server.url, expected))
        page.goto(server.url)
        return page

    yield open_page
    for watched in opened:
        watched.page.context.close()
        assert watched.complaints == []


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


def test_an_answer_comes_in_colours_with_its_figures(server: TalkativeServer, open_page: Opener) -> None:
    page = open_page(server)
    expect(page.locator("#model")).to_have_text("tiny")
    page.get_by_label("Most tokens").fill("120")
    ask(page, "abcabcabcabc")
    wait_for_answers(page)
    origins = [origin for _, origin in tokens_of(page)]
    assert len(origins) == 120
    assert set(origins) == {"ngram", "target"}
    colours = page.locator(".token").evaluate_all(
        "nodes => nodes.map(n => [n.dataset.origin, getComputedStyle(n).backgroundColor])"
    )
    assert len({colour for origin, colour in colours if origin == "ngram"}) == 1
    assert dict(colours)["ngram"] != dict(colours)["target"]
    assert figure(page, "tokens") == "120 tokens"
    legend = [item.strip() for item in page.locator(".legend li").all_inner_texts()]
    assert legend == [f"the model itself {origins.count('target')}", f"ngram {origins.count('ngram')}"]
    assert 0 < int(figure(page, "acceptance").split()[0]) <= 100
    assert float(figure(page, "speed").split()[0]) > 0
    expect(page.get_by_role("status")).to_contain_text("Answer ended, 120 tokens")


def test_plain_against_speculative(server: TalkativeServer, open_page: Opener) -> None:
    page = open_page(server)
    page.get_by_label("Most tokens").fill("60")
    page.get_by_role("switch", name="Speculation").click()
    ask(page, "abcabcabcabc")
    wait_for_answers(page)
    assert {origin for _, origin in tokens_of(page)} == {"target"}
    assert page.locator(".acceptance").count() == 0
    page.get_by_role("button", name="Again, speculative").click()
    wait_for_answers(page, 2)
    assert "ngram" in {origin for _, origin in tokens_of(page)}
    expect(page.locator(".verdict")).to_contain_text("the texts are identical")
    assert page.get_by_role("heading", level=2).all_inner_texts() == ["Plain", "Speculative"]


def test_stop_ends_the_answer_and_the_work(server: TalkativeServer, open_page: Opener) -> None:
    page = open_page(server)
    page.get_by_label("Most tokens").fill("1900")
    server.generator.pause_after(10)
    ask(page, "abc")
    expect(page.locator(".token").nth(5)).to_be_attached()
    assert server.engine.snapshot().num_running == 1
    page.get_by_role("button", name="Stop").click()
    wait_for_answers(page)
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    server.generator.resume()
    deadline = time.monotonic() + PATIENCE
    while server.engine.snapshot().num_running and time.monotonic() < deadline:
        time.sleep(0.01)
    assert server.engine.snapshot().num_running == 0
    assert int(figure(page, "tokens").split()[0]) < 200


def test_the_keyboard_is_enough(server: TalkativeServer, open_page: Opener) -> None:
    page = open_page(server)
    keyboard = page.keyboard
    keyboard.type("first line")
    keyboard.press("Shift+Enter")
    keyboard.type("second line")
    assert page.get_by_label("Message").input_value() == "first line\nsecond line"
    server.generator.pause_after(5)
    keyboard.press("Enter")
    expect(page.locator(".question")).to_have_text("first line\nsecond line")
    expect(page.locator(".token").first).to_be_attached()
    keyboard.press("Escape")
    wait_for_answers(page)
    server.generator.resume()

    def focused() -> str:
        return str(page.evaluate("document.activeElement.id || document.activeElement.textContent"))

    assert focused() == "prompt"
    order = []
    for _ in range(4):
        keyboard.press("Tab")
        order.append(focused())
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
    assert order == ["send", "speculate", "temperature", "max-tokens"]
    page.get_by_role("switch").focus()
    keyboard.press("Space")
    assert not page.get_by_role("switch").is_checked()
    for name in ["prompt", "Again, plain", "new"]:
        while focused() != name:
            keyboard.press("Shift+Tab")
    keyboard.press("Enter")
    expect(page.locator("article")).to_have_count(0)
    assert focused() == "prompt"


def test_focus_is_never_lost(server: TalkativeServer, open_page: Opener) -> None:
    page = open_page(server)
    page.get_by_label("Most tokens").fill("30")
    page.get_by_label("Message").fill("abc")
    page.get_by_role("button", name="Send").focus()
    server.generator.pause_after(3)
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Stop")).to_be_focused()
    server.generator.resume()
    wait_for_answers(page)
    expect(page.get_by_role("button", name="Send")).to_be_focused()
    page.get_by_role("button", name="Again, plain").focus()
    page.keyboard.press("Enter")
    wait_for_answers(page, 2)
    expect(page.get_by_role("button", name="Send")).to_be_focused()


def test_text_is_never_markup(server: TalkativeServer, open_page: Opener) -> None:
    hostile = '<img src="x" onerror="alert(1)"><script>alert(2)</script>&lt;'
    page = open_page(server)
    script(page, [chunk(hostile, [hostile], ["<b>ngram</b>"]), END])
    ask(page, hostile)
    wait_for_answers(page)
    assert tokens_of(page) == [(hostile, "<b>ngram</b>")]
    assert page.locator(".question").inner_text() == hostile
    assert page.locator("#chat img, #chat script, #chat b:not(li b)").count() == 0


def test_tokens_wait_for_their_text(server: TalkativeServer, open_page: Opener) -> None:
    """Half characters and held-back text come late; what is shown is the content, and nothing twice."""
    page = open_page(server)
    script(
        page,
        [
            chunk("The ", ["The", " dra"], ["target", "ngram"]),
            chunk("dra", [""], ["ngram"]),  # the first half of an emoji
            chunk("🐉 STO", ["🐉", " STO"], ["target", "model:d"]),
            chunk("RY", ["R", "Y"], ["target", "ngram"]),
            chunk("odd", ["other"], ["ngram"]),  # its text is not the one shown
            END,
        ],
    )
    ask(page, "x")
    wait_for_answers(page)
    assert tokens_of(page) == [
        ("The", "target"),
        (" ", "ngram"),
        ("dra", "ngram"),
        ("🐉", "target"),
        (" STO", "model:d"),
        ("R", "target"),
        ("Y", "ngram"),
        ("odd", "ngram"),
    ]


def test_thoughts_stand_apart(server: TalkativeServer, open_page: Opener) -> None:
    page = open_page(server)
    thought = chunk("", ["<think>", "hm", "</think>"], ["target", "ngram", "target"])
    thought["choices"][0]["delta"] = {"reasoning_content": "hm"}
    sent = script(page, [thought, chunk("yes", ["\n\n", "yes"], ["target", "model"]), END])
    ask(page, "x")
    wait_for_answers(page)
    assert tokens_of(page) == [("hm", "ngram"), ("yes", "model")]
    assert page.locator(".thoughts").inner_text() == "hm"
    ask(page, "y")
    wait_for_answers(page, 2)
    assert sent[1]["messages"][1] == {"role": "assistant", "content": "yes"}


def test_figures_of_a_trace_by_hand(server: TalkativeServer, open_page: Opener) -> None:
    page = open_page(server)
    chunks = [
        chunk("a", ["a"], ["target"]),
        chunk("bcde", ["b", "c", "d", "e"], ["ngram", "ngram", "ngram", "target"], 3),
        chunk("fg", ["f", "g"], ["model:d", "target"], 5),
        END,
    ]
    script(page, chunks)
    ask(page, "x")
    wait_for_answers(page)
    assert figure(page, "tokens") == "7 tokens"
    assert figure(page, "acceptance") == "50 % accepted"  # 4 of 8
    legend = page.locator(".legend li").all_inner_texts()
    assert [item.strip() for item in legend] == ["the model itself 3", "ngram 3", "model:d 1"]


@pytest.mark.parametrize("step", [1, 2, 3, 100])
def test_fenced_lines_are_code(server: TalkativeServer, open_page: Opener, step: int) -> None:
    text = "See:\n```python\na = `1`\n``\n```\nand `so` on\n"
    parts = [text[i : i + step] for i in range(0, len(text), step)]
    page = open_page(server)
    script(page, [*(chunk(part, [part], ["target"]) for part in parts), END])
    ask(page, "x")
    wait_for_answers(page)
    blocks = page.locator(".prose, .code").evaluate_all("nodes => nodes.map(n => [n.className, n.textContent])")
    assert blocks == [
        ["prose", "See:\n"],
        ["code", "```python\na = `1`\n``\n```\n"],
        ["prose", "and `so` on\n"],
    ]


def test_what_is_sent(server: TalkativeServer, open_page: Opener) -> None:
    page = open_page(server)
    sent = script(page, [chunk("yes", ["yes"], ["target"]), END])
    page.get_by_label("Temperature").fill("0.5")
    ask(page, "one")
    wait_for_answers(page)
    page.get_by_role("switch").click()
    page.get_by_label("Most tokens").fill("")
    ask(page, "two")
    wait_for_answers(page, 2)
    assert sent[0] == {
        "model": "tiny",
        "messages": [{"role": "user", "content": "one"}],
        "temperature": 0.5,
        "max_completion_tokens": 512,
        "speculation": {"enabled": True, "origins": True},
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert sent[1]["speculation"]["enabled"] is False
    assert "max_completion_tokens" not in sent[1]
    assert sent[1]["messages"] == [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "two"},
    ]


def test_the_page_follows_the_text_unless_one_reads_elsewhere(server: TalkativeServer, open_page: Opener) -> None:
    page = open_page(server)
    lines = "line\n" * 100
    script(page, [chunk(lines, [lines], ["target"]), END])
    ask(page, "x")
    wait_for_answers(page)
    at_end = "document.documentElement.scrollTop + innerHeight >= document.documentElement.scrollHeight - 2"
    assert page.evaluate(at_end)
    page.get_by_label("Most tokens").fill("400")
    page.unroute("**/v1/chat/completions")
    server.generator.pause_after(4)
    page.get_by_role("button", name="Again, plain").click()
    expect(page.locator("article").nth(1).locator(".figures")).to_be_visible()
    assert page.evaluate(at_end)
    page.evaluate("document.documentElement.scrollTop = 0")
    server.generator.resume()
    wait_for_answers(page, 2)
    assert page.evaluate("document.documentElement.scrollTop") == 0


def test_an_error_is_told_where_the_answer_would_be(server: TalkativeServer, open_page: Opener) -> None:
    page = open_page(server)
    script(page, [chunk("par", ["par"], ["target"]), {"error": {"message": "the engine broke down"}}])
    ask(page, "x")
    expect(page.get_by_role("alert")).to_have_text("the engine broke down")
    assert tokens_of(page) == [("par", "target")]
    expect(page.get_by_role("button", name="Send")).to_be_visible()


def test_a_server_with_keys_asks_for_one(locked_server: TalkativeServer, open_page: Opener) -> None:
    page = open_page(locked_server, expected="status of 401")
    key = page.get_by_label("API key")
    expect(key).to_be_focused()
    page.keyboard.type("wrong")
    page.keyboard.press("Enter")
    expect(page.locator("#key-note")).to_contain_text("valid API key")
    key.fill(KEY)
    page.keyboard.press("Enter")
    expect(page.locator("#model")).to_have_text("tiny")
    expect(key).to_be_hidden()
    page.get_by_label("Most tokens").fill("20")
    ask(page, "abc")
    wait_for_answers(page)
    assert len(tokens_of(page)) > 0


def test_a_server_that_loads_is_tried_again(server: TalkativeServer, open_page: Opener) -> None:
    page = open_page(server, expected="status of 503")
    answers = iter([503, 200])

    def answer(route: Route) -> None:
        status = next(answers)
        error = {"error": {"message": "the model is still loading"}}
        route.fulfill(status=status, json=error if status == 503 else {"data": [{"id": "loaded"}]})

    page.route("**/v1/models", answer)
    page.reload()
    expect(page.locator("#model")).to_have_text("the model is still loading")
    expect(page.locator("#model")).to_have_text("loaded")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everything_is_labelled_and_readable(
    server: TalkativeServer, open_page: Opener, scheme: Literal["light", "dark"]
) -> None:
    page = open_page(server, scheme=scheme)
    expect(page.locator("#model")).to_have_text("tiny")
    page.evaluate("document.getElementById('access').hidden = false")
    assert page.evaluate(LABEL_FAULTS) == []
    num_texts, faults = page.evaluate(CONTRAST_FAULTS)
    assert faults == []
    assert num_texts > 12
    words = ["plain", "one", "two", "three", "four", "five"]
    origins = ["target", "ngram", "prediction", "model:d", "suffix", "eagle"]
    script(page, [chunk("".join(words), words, origins, 9), {"error": {"message": "broken"}}])
    ask(page, "x")
    wait_for_answers(page)
    assert page.evaluate(LABEL_FAULTS) == []
    num_texts, faults = page.evaluate(CONTRAST_FAULTS)
    assert faults == []
    assert num_texts > 25
    tints = page.locator(".token").evaluate_all("nodes => nodes.map(n => getComputedStyle(n).backgroundColor)")
    assert len(set(tints)) == len(origins)
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert ground == {"light": "rgb(251, 250, 247)", "dark": "rgb(24, 23, 21)"}[scheme]


def test_a_narrow_screen_needs_no_sideways_scrolling(server: TalkativeServer, open_page: Opener) -> None:
    page = open_page(server, width=320)
    long_word = "Rindfleischetikettierungsüberwachungsaufgabenübertragungsgesetz" * 3
    code = f"```\n{long_word}\n```"
    script(page, [chunk(f"{long_word}\n{code}", [f"{long_word}\n", code], ["target", "model:" + "x" * 80], 3), END])
    ask(page, long_word)
    wait_for_answers(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= 320
    for name in ["Send", "New chat", "Again, plain"]:
        box = page.get_by_role("button", name=name).bounding_box()
        assert box is not None
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 320
        assert box["height"] >= 24  # WCAG 2.2 AA: target size


def test_the_policy_of_the_page(server: TalkativeServer) -> None:
    for name, media_type in MEDIA_TYPES.items():
        with urlopen(server.url + ("/" if name == "index.html" else f"/page/{name}")) as answer:
            assert answer.headers["Content-Type"] == media_type
            policy = answer.headers["Content-Security-Policy"].split("; ")
            assert {"default-src 'none'", "script-src 'self'", "require-trusted-types-for 'script'"} <= set(policy)
            assert not any("unsafe" in part or "http" in part or "*" in part for part in policy)
            assert answer.headers["X-Content-Type-Options"] == "nosniff"


def test_markup_from_text_is_refused_by_the_browser(server: TalkativeServer, open_page: Opener) -> None:
    page = open_page(server, expected="TrustedHTML")
    error = page.evaluate("() => { try { document.body.innerHTML = '<b>x</b>'; } catch (e) { return e.name; } }")
    assert error == "TypeError"
