"""The messages of a chat, as clients write them and as chat templates read them.

Clients write OpenAI's messages: a content may be a list of parts, a call's arguments JSON text, a role `developer`.
Templates expect one text, an object, and `system`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from foredraft.errors import ParameterError
from foredraft.models.images import IMAGE_PARTS

#: Takes the image of a content's part, in the order of the messages: the part, and where it is. Raises ParameterError.
TakeImage = Callable[[Mapping[str, Any], str], None]

ROLES = ("system", "developer", "user", "assistant", "tool")
_TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal"})
_EXAMPLE = '{"role": "user", "content": "..."}'


def refuse_image(part: Mapping[str, Any], where: str) -> None:
    """Takes none."""
    raise ParameterError(where, "is an image, and this model takes text only")


def template_messages(
    messages: Sequence[Mapping[str, Any]], take_image: TakeImage = refuse_image, *, as_parts: bool = False
) -> list[dict[str, Any]]:
    """Copies for a template. Further fields (name, tool_call_id, reasoning_content …) stay; those that are None go.

    as_parts: every content is a list of {"type": "text", "text": …} and {"type": "image"}, as templates of models that
    see expect it, not one text. Raises ParameterError, which names the message and its field: `messages[2].content`.
    """
    if not _is_list(messages):
        raise ParameterError("messages", f"must be a list of messages such as {_EXAMPLE}")
    return [_template_message(message, f"messages[{i}]", take_image, as_parts) for i, message in enumerate(messages)]


def template_tools(
    tools: Sequence[Mapping[str, Any]] | None, chat_template: str | None
) -> Sequence[Mapping[str, Any]] | None:
    """The tools as they are. Raises ParameterError for what is no list of objects, or where the template shows none."""
    if tools is not None and not (_is_list(tools) and all(isinstance(tool, Mapping) for tool in tools)):
        raise ParameterError("tools", 'must be a list of {"type": "function", "function": {"name": ...}}')
    if tools and not knows_tools(chat_template):
        raise ParameterError("tools", "are not supported by this model: its chat template knows none")
    return tools


def knows_tools(chat_template: str | None) -> bool:
    return re.search(r"\btools\b", chat_template or "") is not None


def joined_text(content: Any, where: str) -> str:
    """A text, or the texts of its parts joined by line breaks. Raises ParameterError for parts that are no text."""
    parts = _parts(content, where, refuse_image)
    return "\n".join(part["text"] for part in parts)


def _parts(content: Any, where: str, take_image: TakeImage) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not _is_list(content):
        raise ParameterError(where, "must be text, or a list of parts")
    return [_part(part, f"{where}[{i}]", take_image) for i, part in enumerate(content)]


def _template_message(message: Any, where: str, take_image: TakeImage, as_parts: bool) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ParameterError(where, f"is no message; write {_EXAMPLE}")
    fields = {key: value for key, value in message.items() if value is not None}
    role, content = fields.get("role"), fields.get("content")
    if role not in ROLES:
        raise ParameterError(
            f"{where}.role", f"must be one of {', '.join(ROLES)}" if "role" in fields else "is missing"
        )
    if content is None and role != "assistant":
        raise ParameterError(f"{where}.content", "is missing")
    fields["role"] = "system" if role == "developer" else role
    parts = _parts("" if content is None else content, f"{where}.content", take_image)
    fields["content"] = parts if as_parts else "\n".join(part["text"] for part in parts)
    if fields.get("tool_calls"):
        fields["tool_calls"] = _template_calls(fields["tool_calls"], f"{where}.tool_calls")
    return fields


def _part(part: Any, where: str, take_image: TakeImage) -> dict[str, Any]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in IMAGE_PARTS:
        take_image(part, where)
        return {"type": "image"}
    if kind not in _TEXT_PARTS:
        raise ParameterError(
            where, f'is of type {kind!r}, which no model here reads: write {{"type": "text", "text": "..."}}'
        )
    if not isinstance(part.get("text"), str):
        raise ParameterError(f"{where}.text", "must be text")
    return {"type": "text", "text": part["text"]}


def _template_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not _is_list(calls):
        raise ParameterError(where, "must be a list of calls")
    return [_template_call(call, f"{where}[{i}]") for i, call in enumerate(calls)]


def _template_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ParameterError(f"{where}.function", "needs a name")
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            raise ParameterError(f"{where}.function.arguments", "are not JSON") from None
    return {**call, "function": {**function, "arguments": arguments}}


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)
