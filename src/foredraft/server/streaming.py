"""Answers as server-sent events. What an event's size and rhythm tell an eavesdropper can be hidden.

Speculation emits several tokens a pass where the text is easy to foresee, so the sizes of events tell what the text is
like (Wei et al., arXiv 2411.01076). `interval` gathers tokens of several passes; `padding` makes sizes equal.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from itertools import chain
from secrets import token_hex

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from foredraft.engine.async_engine import AnswerStream
from foredraft.errors import ForedraftError
from foredraft.server.answers import Answer
from foredraft.server.config import ServerConfig
from foredraft.server.errors import describe, error_body
from foredraft.server.protocol import StreamOptions
from foredraft.types import Chunk

DONE = b"data: [DONE]\n\n"

#: Bytes that events are padded to where a client asks for it (`include_obfuscation`) and the server sets no size.
DEFAULT_PADDING = 256


@dataclass(frozen=True, slots=True)
class StreamShape:
    """interval: tokens an event gathers; padding: bytes that its size is a multiple of, 0 for none."""

    interval: int
    padding: int
    include_usage: bool

    @classmethod
    def of(cls, config: ServerConfig, options: StreamOptions | None) -> StreamShape:
        options = options or StreamOptions()
        padding = config.stream_padding
        if options.include_obfuscation is not None:
            padding = (padding or DEFAULT_PADDING) if options.include_obfuscation else 0
        return cls(config.stream_interval, padding, bool(options.include_usage))


class EventStream(StreamingResponse):
    """Sends events while the client stays; then nothing more is computed for it, however far the events had come."""

    def __init__(self, events: AsyncIterator[bytes], stream: AnswerStream) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"cache-control": "no-store"})
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._stream:
            await super().__call__(scope, receive, send)


async def send_events(answers: AsyncIterator[Answer], padding: int) -> AsyncIterator[bytes]:
    """Encoded, with the closing mark. An error is the last event: the status has been sent long before."""
    try:
        async for answer in answers:
            yield encode_event(answer, padding)
    except ForedraftError as error:
        yield f"data: {json.dumps(error_body(*describe(error)))}\n\n".encode()
    yield DONE


def encode_event(answer: Answer, padding: int) -> bytes:
    """padding: its length becomes a multiple of so many bytes, by random text that clients ignore."""
    event = b"data: " + answer.model_dump_json(exclude_unset=True).encode() + b"\n\n"
    if not padding:
        return event
    length = len(event) + len(',"obfuscation":""')
    missing = -length % padding
    filled = answer.model_copy(update={"obfuscation": token_hex(missing // 2 + 1)[:missing]})
    return b"data: " + filled.model_dump_json(exclude_unset=True).encode() + b"\n\n"


async def gather_chunks(stream: AnswerStream, interval: int) -> AsyncIterator[Chunk]:
    """One chunk of a choice for each `interval` tokens or more: the first and the last come at once."""
    held: dict[int, list[Chunk]] = {}
    begun: set[int] = set()
    async for chunks in stream:
        for chunk in chunks:
            held.setdefault(chunk.index, []).append(chunk)
        for index, own in list(held.items()):
            num_tokens = sum(len(chunk.token_ids) for chunk in own)
            if num_tokens >= interval or index not in begun or own[-1].finish_reason is not None:
                begun.add(index)
                yield merge_chunks(held.pop(index))


def merge_chunks(chunks: list[Chunk]) -> Chunk:
    """Successive chunks of one choice as one."""
    if len(chunks) == 1:
        return chunks[0]
    logprobs = None
    if chunks[-1].logprobs is not None:
        logprobs = tuple(chain.from_iterable(chunk.logprobs or () for chunk in chunks))
    return replace(
        chunks[-1],
        text="".join(chunk.text for chunk in chunks),
        token_ids=tuple(chain.from_iterable(chunk.token_ids for chunk in chunks)),
        origins=tuple(chain.from_iterable(chunk.origins for chunk in chunks)),
        num_draft_tokens=sum(chunk.num_draft_tokens for chunk in chunks),
        logprobs=logprobs,
    )
