"""Token ids as clients see them: texts, bytes, log-probabilities; and the two requests about nothing but tokens."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from contextlib import nullcontext

from fastapi import Request
from starlette.responses import Response

from foredraft.errors import ParameterError
from foredraft.models.base import TextTokenizer
from foredraft.server.answers import (
    ChatLogprobs,
    CompletionLogprobs,
    DetokenizeAnswer,
    TokenizeAnswer,
    TokenLogprobReport,
    TopLogprob,
    to_json,
)
from foredraft.server.prompts import chat_prompt
from foredraft.server.protocol import DetokenizeRequest, TokenizeChatRequest, TokenizeTextRequest
from foredraft.server.service import SMALL_REQUEST, Service, off_loop, service_of, size_of
from foredraft.types import TokenLogprob

#: Bytes of a request for the ids of a text.
MAX_TOKENIZE_BYTES = 2 << 20


class TokenTexts:
    """What each token of one answer adds to the text: a character made of several belongs to the last of them."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, ids: Iterable[int]) -> list[str]:
        return ["" if self._tokenizer.is_special(id) else self._decode(id) for id in ids]

    def _decode(self, id: int) -> str:
        return self._decoder.decode(self._tokenizer.token_bytes(id))


def decode(tokenizer: TextTokenizer, ids: Iterable[int]) -> str:
    """With special tokens as text, and U+FFFD where the bytes are no UTF-8."""
    return b"".join(map(tokenizer.token_bytes, ids)).decode("utf-8", "replace")


def chat_logprobs(tokenizer: TextTokenizer, entries: Sequence[TokenLogprob]) -> ChatLogprobs:
    content = []
    for entry in entries:
        own = _top_logprob(tokenizer, entry.token_id, entry.logprob)
        top = [_top_logprob(tokenizer, id, logprob) for id, logprob in entry.top]
        content.append(TokenLogprobReport(**own.model_dump(), top_logprobs=top))
    return ChatLogprobs(content=content)


def completion_logprobs(
    tokenizer: TextTokenizer, entries: Sequence[TokenLogprob], texts: Sequence[str], offset: int
) -> CompletionLogprobs:
    """texts: what each token adds to the answer; offset: characters before the first of them."""
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    top = [{_key(tokenizer, id): logprob for id, logprob in (*e.top, (e.token_id, e.logprob))} for e in entries]
    return CompletionLogprobs(
        tokens=[_key(tokenizer, entry.token_id) for entry in entries],
        token_logprobs=[entry.logprob for entry in entries],
        top_logprobs=top if any(entry.top for entry in entries) else None,
        text_offset=offsets,
    )


async def tokenize(body: TokenizeChatRequest | TokenizeTextRequest, request: Request) -> Response:
    """Ids of a text, or of a chat through the model's template, also where the context could not hold them.

    One large request at a time: a token takes some hundred bytes on its way.
    """
    service, size = service_of(request), size_of(request)
    service.model_name(body.model)
    if size > MAX_TOKENIZE_BYTES:
        raise ParameterError("prompt", f"of {size} bytes in all is too long: send at most {MAX_TOKENIZE_BYTES} at once")
    async with service.tokenizing if size >= SMALL_REQUEST else nullcontext():
        return await _tokenize(body, service, size)


async def _tokenize(body: TokenizeChatRequest | TokenizeTextRequest, service: Service, size: int) -> Response:
    tokenizer, max_model_len = service.tokenizer, service.max_model_len
    if isinstance(body, TokenizeTextRequest):
        text, add_special, parse_special = body.prompt, body.add_special_tokens, body.parse_special
        ids = await off_loop(size, lambda: tokenizer.encode(text, add_special=add_special, parse_special=parse_special))
    else:
        ids = list(await chat_prompt(service, body, size))

    def report() -> bytes:
        texts = [decode(tokenizer, [id]) for id in ids] if body.return_token_strs else None
        answer = TokenizeAnswer(count=len(ids), max_model_len=max_model_len, tokens=ids, token_strs=texts)
        return to_json(answer)

    return Response(await off_loop(size, report), media_type="application/json")


async def detokenize(body: DetokenizeRequest, request: Request) -> DetokenizeAnswer:
    """The text of ids."""
    service = service_of(request)
    service.model_name(body.model)
    tokenizer, vocab_size = service.tokenizer, service.engine.generator.model.vocab_size

    def text() -> str:
        if not all(0 <= id < vocab_size for id in body.tokens):
            raise ParameterError("tokens", f"has ids outside 0 .. {vocab_size - 1}")
        return decode(tokenizer, body.tokens)

    return DetokenizeAnswer(prompt=await off_loop(size_of(request), text))


def _top_logprob(tokenizer: TextTokenizer, id: int, logprob: float) -> TopLogprob:
    raw = tokenizer.token_bytes(id)
    return TopLogprob(token=raw.decode("utf-8", "replace"), logprob=_finite(logprob), bytes=list(raw))


def _key(tokenizer: TextTokenizer, id: int) -> str:
    """A token's text; where it is no UTF-8 by itself its bytes, as OpenAI writes them."""
    raw = tokenizer.token_bytes(id)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI writes this for what is practically impossible."""
    return max(logprob, -9999.0)
