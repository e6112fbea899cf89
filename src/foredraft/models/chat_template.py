"""Chat templates: Jinja programs that come with a model and turn messages into a prompt.

They are rendered as Transformers does it (`apply_chat_template`), in a sandbox, since a model file may be hostile: no
attribute of Python is in reach, and time and memory are bounded (`template_limits.py`).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from foredraft.errors import ChatTemplateError, ParameterError
from foredraft.models.base import ImageReader, ReadImage, TextTokenizer
from foredraft.models.images import ImageLoader
from foredraft.models.messages import template_messages, template_tools
from foredraft.models.template_limits import TemplateEnvironment
from foredraft.types import Picture, PicturePrompt


def render_chat(
    tokenizer: TextTokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> str:
    """The prompt of a chat by the model's own template, as text; `encode_chat` gives its token ids.

    Messages are {"role": …, "content": …} with what else the template knows (tool_calls, name …); `tools` are JSON
    schemas of functions; `extra` are further variables of the template. Raises ChatTemplateError.
    """
    if tokenizer.chat_template is None:
        raise ChatTemplateError("the model has no chat template: give it text as it is (--raw), or use a chat model")
    special_tokens = {
        name: tokenizer.token_bytes(id).decode("utf-8", "replace")
        for name, id in (("bos_token", tokenizer.bos_id), ("eos_token", tokenizer.eos_id))
        if id is not None
    }
    return render_template(
        tokenizer.chat_template,
        messages,
        add_generation_prompt=add_generation_prompt,
        tools=tools,
        extra=special_tokens | dict(extra or {}),
    )


def encode_chat(
    tokenizer: TextTokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    extra: Mapping[str, Any] | None = None,
    check: Callable[[str], None] | None = None,
    images: ImageReader | None = None,
    files: bool = False,
) -> Sequence[int]:
    """Token ids of a chat, ready for the answer; a PicturePrompt if it has images. For messages see `models/messages`.

    Further arguments are those of `render_chat`; check: sees the text before it becomes tokens, and may raise; images:
    of a model that sees; files: messages may name images by path. Raises ParameterError for what is no message or
    image, ChatTemplateError.

    Control tokens come from the template alone: a message that spells one means its letters, so that nobody ends a turn
    or speaks as the system from inside a message. The same holds for the tokens that stand for images.
    """
    mark = str(secrets.randbits(96))  # in no message: nobody can guess it; no filter of a template changes digits

    def protect(text: str) -> str:
        return tokenizer.mark_special(text, mark)

    loader = ImageLoader(files=files)
    places: list[str] = []

    def take_image(part: Mapping[str, Any], where: str) -> None:
        if images is None or images.refusal is not None:
            reason = "this model takes text only" if images is None or images.refusal is None else images.refusal
            raise ParameterError(where, f"is an image, and {reason}")
        loader.load(part, where)
        places.append(where)

    plain = template_messages(messages, take_image, as_parts=images is not None and images.as_parts)
    text = render_chat(
        tokenizer,
        [_each_text(message, protect) for message in plain],
        add_generation_prompt=add_generation_prompt,
        tools=template_tools(tools, tokenizer.chat_template),
        extra=extra,
    )
    if check is not None:
        check(text.replace(mark, ""))
    ids = tokenizer.encode(text, parse_special=True, mark=mark)
    if images is None or not loader.images:
        return ids
    read = [_read(images, image, where) for image, where in zip(loader.images, places, strict=True)]
    return with_pictures(ids, read, images.image_token_id)


def _read(images: ImageReader, image: Any, where: str) -> ReadImage:
    try:
        return images.read(image)
    except ValueError as error:
        raise ParameterError(where, f"cannot be read by the model's processor: {error}") from None


def with_pictures(ids: Sequence[int], read: Sequence[ReadImage], image_token_id: int) -> PicturePrompt:
    """Each image token replaced by the tokens of its image. Raises ChatTemplateError if there are more or fewer."""
    num_places = sum(id == image_token_id for id in ids)
    if num_places != len(read):
        raise ChatTemplateError(
            f"the chat template has {num_places} places for {len(read)} images: the model takes images elsewhere, "
            "perhaps only from the user"
        )
    tokens: list[int] = []
    pictures: list[Picture] = []
    waiting = iter(read)
    for id in ids:
        if id != image_token_id:
            tokens.append(id)
            continue
        image = next(waiting)
        pictures.append(Picture(len(tokens), len(image.tokens), image.key, image.inputs))
        tokens += image.tokens
    return PicturePrompt(tokens, pictures)


def _each_text(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of JSON-like data with every text changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _each_text(item, change) for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_each_text(item, change) for item in value]
    return value


def render_template(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> str:
    """A template rendered. A key of a message whose value is None counts as absent. Raises ChatTemplateError."""
    if not messages:
        raise ChatTemplateError("the chat is empty: give at least one message")
    variables = dict(extra or {}) | {
        "messages": [_message(message, f"messages[{i}]") for i, message in enumerate(messages)],
        "tools": _plain(tools, "tools"),
        "documents": None,
        "add_generation_prompt": add_generation_prompt,
    }
    try:
        return TemplateEnvironment().from_string(template).render(variables)
    except ChatTemplateError:
        raise
    except Exception as error:  # whatever a template's expressions may raise, from TypeError to RecursionError
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ChatTemplateError(
            f"the chat template refused the messages: {reason[:300]}; change them, or give text as it is (--raw)"
        ) from None


def _message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ChatTemplateError(f'{where} is no message; write {{"role": "user", "content": "..."}}')
    return {key: value for key, value in _plain(message, where).items() if value is not None}


def _plain(value: Any, where: str) -> Any:
    """A copy in JSON's types: a template must not reach objects with methods of their own."""
    if value is None or isinstance(value, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, Sequence):
        return [_plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
    raise ChatTemplateError(f"{where} is a {type(value).__name__}; a chat holds what JSON can hold")
