"""Errors, keys, starts; whom the page can be read by, and what it lets in."""

from __future__ import annotations

from typing import Literal
from urllib.request import urlopen

import pytest
from playwright.sync_api import Route, expect

from foredraft.server.web import MEDIA_TYPES
from tests.server.page.browsing import (
    CONTRAST_FAULTS,
    END,
    KEY,
    LABEL_FAULTS,
    Opener,
    TalkativeServer,
    ask,
    chunk,
    script,
    tokens_of,
    wait_for_answers,
)


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
