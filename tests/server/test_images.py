"""Images over HTTP: data URLs only, within limits, and nobody else's request suffers."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from foredraft.drafters.ngram import NgramDrafter
from foredraft.testing import TinyModel
from foredraft.types import SamplingParams
from tests.models.eyes import BLINDING_WIDTH, REFUSED_WIDTH, Eyes, ask, data_url, file_of, picture, seeing_tokenizer
from tests.server.serving import GatedGenerator, Server, running_server

CHAT = "/v1/chat/completions"
FIELDS: dict[str, Any] = {"temperature": 0, "max_tokens": 16, "ignore_eos": True}


def make_seeing(eyes: Eyes | None = None) -> GatedGenerator:
    model = TinyModel(vocab_size=272, max_model_len=512, num_blocks=160, kinship=8.0)
    options: dict[str, Any] = {"adaptive": False, "num_speculative_tokens": 4, "native": False}
    return GatedGenerator(model, seeing_tokenizer(), [NgramDrafter()], images=eyes or Eyes(), **options)


@pytest.fixture(scope="module")
def seeing() -> Iterator[Server]:
    with running_server(make_seeing()) as running:
        yield running


def answer(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["message"]["content"]
    return text


def refusal(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert "\n" not in error["message"]
    return error


def library(*messages: dict[str, Any]) -> str:
    with make_seeing() as alone:
        return alone.chat(list(messages), SamplingParams(**FIELDS))[0].text


def image_url(url: str) -> list[dict[str, Any]]:
    parts = [{"type": "text", "text": "what?"}, {"type": "image_url", "image_url": {"url": url}}]
    return [{"role": "user", "content": parts}]


def test_the_answer_is_the_library_s(seeing: Server) -> None:
    chats = [ask("what?", picture(1)), ask("what?", picture(2)), ask("what?", picture(1), picture(2))]
    texts = [answer(seeing.post(CHAT, messages=[chat], **FIELDS)) for chat in chats]
    assert texts == [library(chat) for chat in chats]
    assert len(set(texts)) == 3
    events = seeing.events(CHAT, messages=[chats[0]], **FIELDS)
    assert "".join(e["choices"][0]["delta"].get("content") or "" for e in events if e["choices"]) == texts[0]


def test_many_images_at_once_beside_texts(seeing: Server) -> None:
    chats = [ask("what?", picture(seed % 5)) if seed % 3 else ask(f"text {seed}") for seed in range(24)]
    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(lambda chat: answer(seeing.post(CHAT, messages=[chat], **FIELDS)), chats))
    assert got == [library(chat) for chat in chats]


def test_images_count_as_prompt_tokens(seeing: Server) -> None:
    usage = seeing.post(CHAT, messages=[ask("what?", picture(1, 80))], **FIELDS).json()["usage"]
    ids = seeing.post("/tokenize", messages=[ask("what?", picture(1, 80))]).json()
    assert ids["count"] == usage["prompt_tokens"] == len("what?") + 10 + 3
    error = refusal(seeing.post(CHAT, messages=[ask("what?", picture(1, 8 * 600, 100))], **FIELDS))
    assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    "url", ["http://169.254.169.254/latest", "https://example.org/a.png", "file:///etc/passwd", "ftp://a/b.png"]
)
def test_nothing_is_fetched(seeing: Server, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    error = refusal(seeing.post(CHAT, messages=image_url(url)))
    assert error["param"] == "messages[0].content[1].image_url.url"
    assert "none is fetched: send it as a data URL" in error["message"]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image", "image": "/etc/passwd"},
        {"type": "image_url", "image_url": "/etc/passwd"},
        {"type": "image_url", "image_url": {"url": "~/picture.png"}},
        {"type": "input_image", "image_url": "picture.png"},
    ],
)
def test_no_file_is_opened(seeing: Server, part: dict[str, Any]) -> None:
    error = refusal(seeing.post(CHAT, messages=[{"role": "user", "content": [part]}]))
    assert "must be a data URL" in error["message"]


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        (data_url(b"not an image"), "is no image"),
        (data_url(file_of(picture())[:100]), "is a broken image"),
        (data_url(file_of(picture(0, REFUSED_WIDTH))), "cannot be read by the model's processor"),
        ("data:image/png;base64,###", "is not base64"),
        ("data:image/svg+xml,<svg/>", "is no data URL of an image"),
    ],
)
def test_bad_images(seeing: Server, url: str, problem: str) -> None:
    error = refusal(seeing.post(CHAT, messages=image_url(url)))
    assert problem in error["message"]
    assert error["param"].startswith("messages[0].content[1]")


def test_wrong_shapes(seeing: Server) -> None:
    for value in (5, {"url": 5}, {}, ["data:"]):
        part = {"type": "image_url", "image_url": value}
        assert refusal(seeing.post(CHAT, messages=[{"role": "user", "content": [part]}]))["param"].startswith(
            "messages"
        )


def test_more_images_than_the_template_shows(seeing: Server) -> None:
    error = refusal(seeing.post(CHAT, messages=[ask("be brief", picture(), role="system"), ask("what?", picture())]))
    assert "has 1 places for 2 images" in error["message"]


def test_an_image_that_the_model_cannot_read_ends_its_own_request(seeing: Server) -> None:
    good, bad = ask("what?", picture(1)), ask("what?", picture(1, BLINDING_WIDTH))
    with ThreadPoolExecutor(4) as pool:
        responses = list(pool.map(lambda c: seeing.post(CHAT, messages=[c], **FIELDS), [good, bad, good, bad]))
    assert [r.status_code for r in responses] == [200, 500, 200, 500]
    assert answer(responses[0]) == answer(responses[2]) == library(good)
    assert "could not read an image" in responses[1].json()["error"]["message"]
    assert seeing.client.get("/health").status_code == 200


def test_a_blind_model_says_so(server: Server) -> None:
    error = refusal(server.post(CHAT, messages=[ask("what?", picture())]))
    assert error["param"] == "messages[0].content[0]"
    assert error["message"].endswith("is an image, and this model takes text only")
    with running_server(make_seeing(Eyes(refusal="this model takes none here: why"))) as blind:
        error = refusal(blind.post(CHAT, messages=[ask("what?", picture())]))
        assert error["message"].endswith("is an image, and this model takes none here: why")
        assert answer(blind.post(CHAT, messages=[ask("what?")], **FIELDS))


def test_salts_keep_images_apart(seeing: Server) -> None:
    def cached(salt: str) -> int:
        body = seeing.post(CHAT, messages=[ask("what?", picture(7, 800))], cache_salt=salt, **FIELDS).json()
        number: int = body["usage"]["prompt_tokens_details"]["cached_tokens"]
        return number

    assert [cached(salt) for salt in ("a", "b", "a")] == [0, 0, 96]
