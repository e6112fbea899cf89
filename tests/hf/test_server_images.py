"""A server of a model of Transformers that sees: images, broken ones and texts, one behind the other and at once."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from foredraft import LLM, SamplingParams
from tests.models.eyes import data_url, file_of
from tests.models.hf.vision_zoo import picture, write_folder
from tests.server.serving import Server, running_server

CHAT = "/v1/chat/completions"
FIELDS: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}


class ServedLLM(LLM):
    """With the gate that the tests' server opens when it ends."""

    gate = threading.Event()


def ask(text: str, *images: Any) -> list[dict[str, Any]]:
    """images: of Pillow, or the bytes of a file."""
    files = [image if isinstance(image, bytes) else file_of(image) for image in images]
    parts = [{"type": "image_url", "image_url": {"url": data_url(file)}} for file in files]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def answer(server: Server, messages: list[dict[str, Any]]) -> str:
    response = server.post(CHAT, messages=messages, **FIELDS)
    assert response.status_code == 200, response.text
    text: str = response.json()["choices"][0]["message"]["content"]
    return text


def test_after_images_the_server_goes_on(tmp_path: Path) -> None:
    write_folder(tmp_path, "llava")
    chats = [ask("what is it?", picture(1)), ask("nothing to see"), ask("and this?", picture(2)), ask("bye")]
    with LLM(tmp_path, "none", backend="hf", device="cpu") as alone:
        wanted = [alone.chat(messages, SamplingParams(**FIELDS))[0].text for messages in chats]
    llm = ServedLLM(tmp_path, "ngram", backend="hf", device="cpu", adaptive=False)
    with running_server(llm) as server:  # type: ignore[arg-type]
        assert [answer(server, messages) for messages in chats] == wanted
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(lambda messages: answer(server, messages), chats * 2)) == wanted * 2
        refused = server.post(CHAT, messages=ask("broken?", b"no image"), **FIELDS)
        assert refused.status_code == 400
        assert "is no image" in refused.json()["error"]["message"]
        with torch.no_grad():  # the model's eyes break: who shows something new gets an error, others do not
            tower = llm.model.transformers_model.model.vision_tower  # type: ignore[attr-defined]
            tower.forward = lambda *_, **__: 1 // 0
        assert server.post(CHAT, messages=ask("new?", picture(3)), **FIELDS).status_code == 500
        assert [answer(server, messages) for messages in chats] == wanted
        assert server.client.get("/health").status_code == 200
