"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
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
)
from foredraft.server.constraints import ToolUse, wanted_format, wanted_text
from foredraft.server.generation import respond
from foredraft.server.messages import MessageReader, MessageShape
from foredraft.server.prompts import chat_prompt
from foredraft.server.protocol import ChatCompletionRequest
from foredraft.server.reasoning import thinking_after
from foredraft.server.sampling import blamed, chat_params
from foredraft.server.service import off_loop, service_of, size_of
from foredraft.server.tokens import chat_logprobs
from foredraft.types import Chunk, Completion, TokenLogprob


async def create_chat_completion(body: ChatCompletionRequest, request: Request) -> Response:
    """Answers a chat, at once or as a stream of events."""
    service = service_of(request)
    service.model_name(body.model)
    tokenizer = service.tokenizer
    tools = ToolUse.of(body, tokenizer.chat_template)
    params = chat_params(body, service.config.max_completion_tokens)
    chat = body.model_copy(update={"tools": None}) if body.tool_choice == "none" else body
    size = size_of(request)
    with blamed({"prompt": "messages", "structured_outputs": _constraint_field(body)}):
        prompt = await chat_prompt(service, chat, size, service.engine.generator.refuse_overlong)
        thinking = thinking_after(tokenizer, prompt)
        grammar = await off_loop(size, lambda: wanted_text(wanted_format(body), tools, thinking))
        params = replace(params, structured_outputs=grammar)
        form = ChatForm(tokenizer, MessageShape(thinking, tools, body.include_reasoning is not False))
        return await respond(request, body, form, [prompt], params)


def _constraint_field(body: ChatCompletionRequest) -> str:
    """Whom to blame for a grammar that cannot be."""
    has_format = body.response_format is not None and body.response_format.type != "text"
    return "structured_outputs" if body.structured_outputs else "response_format" if has_format else "tools"


class ChatForm:
    id_prefix = "chatcmpl"
    is_chat = True

    def __init__(self, tokenizer: TextTokenizer, shape: MessageShape) -> None:
        self._tokenizer = tokenizer
        self._shape = shape
        self._readers: dict[int, MessageReader] = {}  # of each choice that is streamed

    def make_choice(self, completion: Completion) -> ChatChoice:
        reader = MessageReader(self._shape)
        message = reader.whole(completion.text)
        return ChatChoice(
            index=completion.index,
            message=message,
            logprobs=self._logprobs(completion.logprobs),
            finish_reason=reader.finish_reason(completion.finish_reason),
        )

    def make_piece(self, chunk: Chunk, texts: Sequence[str], *, is_first: bool) -> ChatChunkChoice:
        reader = self._readers.setdefault(chunk.index, MessageReader(self._shape))
        delta = reader.piece(chunk.text, is_first=is_first, is_last=chunk.finish_reason is not None)
        return ChatChunkChoice(
            index=chunk.index,
            delta=delta,
            logprobs=self._logprobs(chunk.logprobs),
            finish_reason=reader.finish_reason(chunk.finish_reason),
        )

    def make_answer(self, choices: Sequence[Any], head: dict[str, Any], *, is_chunk: bool) -> Answer:
        if is_chunk:
            return ChatCompletionChunk(**head, object="chat.completion.chunk", choices=list(choices))
        return ChatCompletion(**head, object="chat.completion", choices=list(choices))

    def _logprobs(self, entries: Sequence[TokenLogprob] | None) -> ChatLogprobs | None:
        return None if entries is None else chat_logprobs(self._tokenizer, entries)
