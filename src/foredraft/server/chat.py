"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import Request
from starlette.responses import Response

from foredraft.models.base import TextTokenizer
from foredraft.server.answers import (
    Answer,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatLogprobs,
    MessageReport,
)
from foredraft.server.generation import respond
from foredraft.server.prompts import chat_prompt
from foredraft.server.protocol import ChatCompletionRequest
from foredraft.server.sampling import chat_params
from foredraft.server.service import service_of
from foredraft.server.tokens import chat_logprobs
from foredraft.types import Chunk, Completion, TokenLogprob


async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
    """Answers a chat, at once or as a stream of events."""
    service = service_of(request)
    service.model_name(body.model)
    params = chat_params(body, service.config.max_completion_tokens)
    prompt = await chat_prompt(service.tokenizer, body)
    return await respond(request, body, ChatForm(service.tokenizer), [prompt], params)


class ChatForm:
    id_prefix = "chatcmpl"
    is_chat = True

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer

    def make_choice(self, completion: Completion) -> ChatChoice:
        return ChatChoice(
            index=completion.index,
            message=MessageReport(role="assistant", content=completion.text),
            logprobs=self._logprobs(completion.logprobs),
            finish_reason=completion.finish_reason,
        )

    def make_piece(self, chunk: Chunk, texts: Sequence[str], *, is_first: bool) -> ChatChunkChoice:
        delta = MessageReport(content=chunk.text)
        if is_first:
            delta.role = "assistant"
        return ChatChunkChoice(
            index=chunk.index,
            delta=delta,
            logprobs=self._logprobs(chunk.logprobs),
            finish_reason=chunk.finish_reason,
        )

    def make_answer(self, choices: Sequence[Any], head: dict[str, Any], *, is_chunk: bool) -> Answer:
        if is_chunk:
            return ChatCompletionChunk(**head, object="chat.completion.chunk", choices=list(choices))
        return ChatCompletion(**head, object="chat.completion", choices=list(choices))

    def _logprobs(self, entries: Sequence[TokenLogprob] | None) -> ChatLogprobs | None:
        return None if entries is None else chat_logprobs(self._tokenizer, entries)
