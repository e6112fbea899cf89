"""Chats and texts to token ids."""

from __future__ import annotations

from foredraft.errors import ChatTemplateError, ParameterError
from foredraft.models.base import TextTokenizer
from foredraft.models.chat_template import encode_chat
from foredraft.server.protocol import ChatPrompt, CompletionRequest
from foredraft.server.service import off_loop


async def chat_prompt(tokenizer: TextTokenizer, chat: ChatPrompt) -> list[int]:
    """Through the model's template, ready for the answer. Raises ParameterError, ChatTemplateError."""
    if tokenizer.chat_template is None:
        raise ChatTemplateError("the model has no chat template: give it text as it is, by /v1/completions")
    messages = [message.model_dump(exclude_none=True) for message in chat.messages]
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
