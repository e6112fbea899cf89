"""Servers of the page, and pages in headless Chromium."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Literal

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.server.page.browsing import KEY, Opener, TalkativeServer, Watched, running
from tests.server.serving import PATIENCE


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
