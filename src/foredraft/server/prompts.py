"""Chats and texts to token ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from foredraft.errors import ChatTemplateError, ParameterError
from foredraft.models.base import TextTokenizer
from foredraft.models.chat_template import encode_chat
from foredraft.models.images import IMAGE_PARTS
from foredraft.server.protocol import ChatPrompt, CompletionRequest
from foredraft.server.service import Service, off_loop

#: Raises PromptTooLongError for a text that cannot fit.
Check = Callable[[str], None]


async def chat_prompt(service: Service, chat: ChatPrompt, size: int, check: Check | None = None) -> Sequence[int]:
    """Through the model's template, ready for the answer.

    size: bytes of the request; check: refuses a text before it becomes tokens. Raises ParameterError,
    ChatTemplateError, and what `check` raises.
    """
    tokenizer, images = service.tokenizer, service.engine.generator.images
    if tokenizer.chat_template is None:
        raise ChatTemplateError("the model has no chat template: give it text as it is, by /v1/completions")

    def encode() -> Sequence[int]:
        return encode_chat(
            tokenizer,
            [message.model_dump(exclude_none=True) for message in chat.messages],
            add_generation_prompt=chat.add_generation_prompt,
            tools=[tool.model_dump(exclude_unset=True) for tool in chat.tools] if chat.tools else None,
            extra=chat.chat_template_kwargs,
            check=check,
            images=images,
        )

    if _has_images(chat):
        return await service.engine.run_beside(encode)
    return await off_loop(size, encode)


def _has_images(chat: ChatPrompt) -> bool:
    """Few bytes may be many pixels, and many pixels much memory."""
    contents = [message.content for message in chat.messages if isinstance(message.content, list)]
    return any(part.type in IMAGE_PARTS for content in contents for part in content)


async def text_prompts(
    tokenizer: TextTokenizer, body: CompletionRequest, size: int, check: Check
) -> list[Sequence[int]]:
    """One or several. Arguments and errors are those of `chat_prompt`."""
    prompt = body.prompt
    if not prompt:
        raise ParameterError("prompt", "is empty: give at least one token")
    several = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt

    def encode(text: str) -> list[int]:
        check(text)
        return tokenizer.encode(text, add_special=body.add_special_tokens, parse_special=body.parse_special)

    return await off_loop(size, lambda: [encode(p) if isinstance(p, str) else p for p in several])
