"""What one sees and sends while chatting."""

from __future__ import annotations

import time

import pytest
from playwright.sync_api import expect

from tests.server.page.browsing import (
    END,
    Opener,
    TalkativeServer,
    ask,
    chunk,
    figure,
    script,
    tokens_of,
    wait_for_answers,
)
from tests.server.serving import PATIENCE


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
