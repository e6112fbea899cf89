"""The messages of a chat, as clients write them and as chat templates read them.

Clients write OpenAI's messages: a content may be a list of parts, a call's arguments JSON text, a role `developer`.
Templates expect one text, an object, and `system`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from foredraft.errors import ParameterError

ROLES = ("system", "developer", "user", "assistant", "tool")
_TEXT_PARTS = frozenset({"text", "input_text", "output_text", "refusal"})
_EXAMPLE = '{"role": "user", "content": "..."}'


def template_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copies for a template. Further fields (name, tool_call_id, reasoning_content …) stay; those that are None go.

    Raises ParameterError, which names the message and its field: `messages[2].content`.
    """
    if not _is_list(messages):
        raise ParameterError("messages", f"must be a list of messages such as {_EXAMPLE}")
    return [_template_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


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
    if isinstance(content, str):
        return content
    if not _is_list(content):
        raise ParameterError(where, "must be text, or a list of text parts")
    return "\n".join(_text_of(part, f"{where}[{i}]") for i, part in enumerate(content))


def _template_message(message: Any, where: str) -> dict[str, Any]:
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
    fields["content"] = "" if content is None else joined_text(content, f"{where}.content")
    if fields.get("tool_calls"):
        fields["tool_calls"] = _template_calls(fields["tool_calls"], f"{where}.tool_calls")
    return fields


def _text_of(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in _TEXT_PARTS:
        raise ParameterError(
            where, f'is of type {kind!r}: a chat takes text only, as {{"type": "text", "text": "..."}}'
        )
    if not isinstance(part.get("text"), str):
        raise ParameterError(f"{where}.text", "must be text")
    text: str = part["text"]
    return text


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
