"""A server of a tiny model on a real socket, in a thread of the test's process."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import uvicorn

from foredraft.drafters.ngram import NgramDrafter
from foredraft.engine.async_engine import AsyncEngine
from foredraft.engine.generator import Generator
from foredraft.server.app import make_app
from foredraft.server.config import ServerConfig
from foredraft.server.limits import HTTPConnection
from foredraft.server.run import listen, url_of
from foredraft.testing import ByteTokenizer, TinyModel
from foredraft.types import Chunk, Completion, SamplingParams

#: Seconds that no test comes near, unless something hangs.
PATIENCE = 60.0


class GatedGenerator(Generator):
    """Steps only while its gate is open, so that a test decides what the engine is in the middle of."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.gate = threading.Event()
        self.gate.set()
        self.num_steps = 0

    def step(self) -> list[Chunk]:
        if not self.gate.wait(PATIENCE):
            raise RuntimeError("the test never opened the gate")
        self.num_steps += 1
        return super().step()


def make_generator(**options: Any) -> GatedGenerator:
    """A model whose text repeats itself, and its n-gram drafter. Equal calls make equal generators."""
    model = TinyModel(vocab_size=272, max_model_len=512, num_blocks=160, kinship=8.0)
    settings: dict[str, Any] = {"adaptive": False, "num_speculative_tokens": 4, **options}
    return GatedGenerator(model, ByteTokenizer(), [NgramDrafter()], native=False, **settings)


@dataclass
class Server:
    """What a test sees of a running server."""

    url: str
    engine: AsyncEngine
    generator: GatedGenerator
    client: httpx.Client
    loop: asyncio.AbstractEventLoop = field(repr=False)

    def chat(self, text: str, **fields: Any) -> httpx.Response:
        return self.post("/v1/chat/completions", messages=[{"role": "user", "content": text}], **fields)

    def complete(self, prompt: Any, **fields: Any) -> httpx.Response:
        return self.post("/v1/completions", prompt=prompt, **fields)

    def post(self, path: str, **fields: Any) -> httpx.Response:
        body = json.dumps(fields)  # in ASCII: httpx refuses lone surrogates, other clients send them
        return self.client.post(path, content=body, headers={"content-type": "application/json"})

    def events(self, path: str, **fields: Any) -> list[dict[str, Any]]:
        """All events of a stream, which must end as streams do."""
        with self.client.stream("POST", path, json={**fields, "stream": True}) as response:
            assert response.status_code == 200, response.read()
            lines = [line for line in response.iter_lines() if line]
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]

    def texts(self, path: str, **fields: Any) -> list[str]:
        """What a stream of completions adds up to, by choice."""
        texts: dict[int, str] = {}
        for event in self.events(path, **fields):
            for choice in event["choices"]:
                texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
        return [texts[index] for index in sorted(texts)]

    def library(self, prompt: str | list[int], params: SamplingParams) -> list[Completion]:
        """What the library answers, alone on an engine of its own."""
        with make_generator() as alone:
            return alone.generate(prompt, params)


@contextmanager
def running_server(
    generator: GatedGenerator | None = None, may_load: threading.Event | None = None, **settings: Any
) -> Iterator[Server]:
    """may_load: the model is there once it is set (None: at once). settings: of ServerConfig."""
    config = ServerConfig(**{"model_names": ("tiny",), **settings})
    own = generator or make_generator()

    def load() -> Generator:
        if may_load is not None and not may_load.wait(PATIENCE):
            raise RuntimeError("the test never let the model load")
        return own

    engine = AsyncEngine(load, max_num_waiting=config.max_num_waiting)
    app = make_app(engine, config)
    web = uvicorn.Server(
        uvicorn.Config(app, log_config=None, access_log=False, lifespan="on", http=HTTPConnection, ws="none")
    )
    sock = listen("127.0.0.1", 0)
    started: list[asyncio.AbstractEventLoop] = []
    is_up = threading.Event()

    async def run() -> None:
        started.append(asyncio.get_running_loop())
        serving = asyncio.create_task(web.serve(sockets=[sock]))
        if may_load is None:
            await asyncio.wait_for(engine.loaded(), PATIENCE)
        is_up.set()
        await serving

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    try:
        assert is_up.wait(PATIENCE)
        with httpx.Client(base_url=url_of(sock), timeout=PATIENCE) as client:
            yield Server(url_of(sock), engine, own, client, started[0])
    finally:
        own.gate.set()
        if may_load is not None:
            may_load.set()
        web.should_exit = True
        thread.join(PATIENCE)
        sock.close()


def connect(server: Server) -> socket.socket:
    """A bare connection, for clients that misbehave."""
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=PATIENCE)
