"""Chats and texts to token ids."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from foredraft.errors import ChatTemplateError, ParameterError
from foredraft.models.base import TextTokenizer
from foredraft.models.chat_template import encode_chat
from foredraft.server.protocol import ChatPrompt, CompletionRequest, Message
from foredraft.server.sampling import plain_text
from foredraft.server.service import off_loop

#: What a message of this role must have besides.
_NEEDS_CONTENT = frozenset({"system", "user", "tool"})


async def chat_prompt(tokenizer: TextTokenizer, chat: ChatPrompt) -> list[int]:
    """Through the model's template, ready for the answer. Raises ParameterError, ChatTemplateError."""
    if tokenizer.chat_template is None:
        raise ChatTemplateError("the model has no chat template: give it text as it is, by /v1/completions")
    messages = [_template_message(message, f"messages[{i}]") for i, message in enumerate(chat.messages)]
    tools = [tool.model_dump(exclude_unset=True) for tool in chat.tools] if chat.tools else None
    add_generation_prompt, extra = chat.add_generation_prompt, chat.chat_template_kwargs

    def encode() -> list[int]:
        return encode_chat(tokenizer, messages, add_generation_prompt=add_generation_prompt, tools=tools, extra=extra)

    return await off_loop(sum(len(str(message.get("content"))) for message in messages), encode)


async def text_prompts(tokenizer: TextTokenizer, body: CompletionRequest) -> list[list[int]]:
    """One or several. Raises ParameterError."""
    prompt = body.prompt
    if not prompt:
        raise ParameterError("prompt", "is empty: give at least one token")
    several = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
    add_special, parse_special = body.add_special_tokens, body.parse_special

    def encode() -> list[list[int]]:
        return [
            tokenizer.encode(p, add_special=add_special, parse_special=parse_special) if isinstance(p, str) else p
            for p in several
        ]

    return await off_loop(sum(len(p) for p in several if isinstance(p, str)), encode)


def _template_message(message: Message, where: str) -> dict[str, Any]:
    """As templates expect it: content as one text, arguments of calls as objects, no role that only OpenAI knows."""
    fields = message.model_dump(exclude_none=True)
    content = plain_text(message.content, f"{where}.content")
    if content is None and message.role in _NEEDS_CONTENT:
        raise ParameterError(f"{where}.content", "is missing")
    fields["role"] = "system" if message.role == "developer" else message.role
    fields["content"] = content or ""
    if fields.get("tool_calls"):
        fields["tool_calls"] = _tool_calls(fields["tool_calls"], f"{where}.tool_calls")
    return fields


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        raise ParameterError(where, "must be a list of calls")
    return [_tool_call(call, f"{where}[{i}]") for i, call in enumerate(calls)]


def _tool_call(call: Mapping[str, Any], where: str) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ParameterError(f"{where}.function", "needs a name")
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            raise ParameterError(f"{where}.function.arguments", "are not JSON") from None
    return {**call, "function": {**function, "arguments": arguments}}
