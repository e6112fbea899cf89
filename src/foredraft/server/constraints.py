"""What a request wants its text to be, as a grammar: its format, and the calls that it demands.

start: thought? (calls | answer)      thought: what a thinking model writes first; calls: in the template's own form
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foredraft.engine.grammar import JSON_BLANKS
from foredraft.errors import ParameterError
from foredraft.models.messages import knows_tools
from foredraft.server.protocol import ChatCompletionRequest, FunctionDefinition, GenerationRequest, NamedToolChoice
from foredraft.server.reasoning import CLOSE as THOUGHT_CLOSE
from foredraft.server.reasoning import OPEN as THOUGHT_OPEN
from foredraft.server.reasoning import Thinking
from foredraft.server.tool_calls import CLOSE, OPEN
from foredraft.types import StructuredOutputs

_ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
_NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
_KEYS_OF_KIND = frozenset({"type", "$ref", "anyOf", "oneOf", "allOf", "enum", "const"})


@dataclass(frozen=True, slots=True)
class CallStyle:
    """How a template writes calls: in tags, any number of them; or as one bare object."""

    is_tagged: bool
    arguments_key: str

    @classmethod
    def of(cls, chat_template: str | None) -> CallStyle | None:
        """None for a template that knows no tools."""
        if chat_template is None or not knows_tools(chat_template):
            return None
        return cls(OPEN in chat_template, "parameters" if '"parameters"' in chat_template else "arguments")


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools that an answer may call, or must."""

    functions: Sequence[FunctionDefinition]
    style: CallStyle
    is_required: bool
    max_num_calls: int | None

    @classmethod
    def of(cls, body: ChatCompletionRequest, chat_template: str | None) -> ToolUse | None:
        """None where nothing may be called. Raises ParameterError for a choice that cannot be met."""
        choice = body.tool_choice
        if not body.tools:
            if choice not in (None, "none", "auto"):
                raise ParameterError("tool_choice", "needs tools to choose from")
            return None
        if choice == "none":
            return None
        style = CallStyle.of(chat_template)
        if style is None:
            raise ParameterError("tools", "are not supported by this model: its chat template knows none")
        functions = [tool.function for tool in body.tools]
        if isinstance(choice, NamedToolChoice):
            name = choice.function.name
            functions = [function for function in functions if function.name == name]
            if not functions:
                raise ParameterError("tool_choice", f"names {name!r}, which is not among the tools")
        is_single = isinstance(choice, NamedToolChoice) or body.parallel_tool_calls is False or not style.is_tagged
        return cls(functions, style, choice not in (None, "auto"), 1 if is_single else None)


def wanted_format(body: GenerationRequest) -> StructuredOutputs | None:
    """Of `response_format`, or of vLLM's `structured_outputs`. Raises ParameterError."""
    wanted, form = body.structured_outputs, body.response_format
    if form is not None and form.type == "json_schema" and form.json_schema is None:
        raise ParameterError("response_format.json_schema", "is missing")
    if wanted is not None:
        if form is not None and form.type != "text":
            raise ParameterError(
                "structured_outputs", "and response_format say each what the text is; give one of them"
            )
        return StructuredOutputs(
            json_schema=wanted.json_,
            json_object=bool(wanted.json_object),
            regex=wanted.regex,
            choice=wanted.choice or (),
            grammar=wanted.grammar,
        )
    if form is None or form.type == "text":
        return None
    if form.json_schema is None:
        return StructuredOutputs(json_object=True)
    return StructuredOutputs(json_schema=_schema(form.json_schema.schema_))


def wanted_text(
    form: StructuredOutputs | None, tools: ToolUse | None, thinking: Thinking | None
) -> StructuredOutputs | None:
    """The whole text's grammar: thought, calls and answer together. Raises ParameterError for what does not combine."""
    demands_calls = tools is not None and tools.is_required
    thinks = thinking in ("inside", "possible")
    if form is None and not demands_calls:
        return None
    if form is not None and tools is None and not thinks:
        return form
    rules: list[str] = []
    bodies: list[str] = []
    if tools is not None:
        rules += _call_rules(tools)
        bodies.append("calls")
    if form is not None and not demands_calls:
        if form.json_schema is None and not form.json_object:
            what = "tools" if tools is not None else "a model that thinks aloud"
            raise ParameterError("structured_outputs", f"other than JSON do not combine with {what}")
        schema = _ANY_OBJECT if form.json_schema is None else _parse_schema(form.json_schema)
        rules.append(f"answer: {_json_rule(schema, whitespace_pattern=JSON_BLANKS)}")
        bodies.append("answer")
    start = f"({' | '.join(bodies)})"
    if thinks:
        begin = re.escape(THOUGHT_OPEN) if thinking == "possible" else ""
        end = THOUGHT_CLOSE.replace("/", r"\/")
        rules += [rf"thought[lazy]: /{begin}(?s:.*){end}/", r"layout: /[ \n]{0,4}/"]
        start = f"thought layout {start}" if thinking == "inside" else f"(thought layout)? {start}"
    return StructuredOutputs(grammar="\n".join([f"start: {start}", *rules]))


def _call_rules(tools: ToolUse) -> list[str]:
    """Calls as the template writes them, so that most of their tokens are known beforehand."""
    begin, end = (OPEN + "\n", "\n" + CLOSE) if tools.style.is_tagged else ("", "")
    names = [f"call_{i}" for i in range(len(tools.functions))]
    rules = ["calls: call" if tools.max_num_calls == 1 else r'calls: call ("\n" call)*', f"call: {' | '.join(names)}"]
    for name, function in zip(names, tools.functions, strict=True):
        head = f'{begin}{{"name": {json.dumps(function.name)}, "{tools.style.arguments_key}": '
        schema = _NO_ARGUMENTS if function.parameters is None else function.parameters
        if not _KEYS_OF_KIND & schema.keys():
            schema = {"type": "object", **schema}
        arguments = _json_rule(schema, whitespace_flexible=False, item_separator=", ", key_separator=": ")
        rules += [
            f"{name}: {json.dumps(head)} {name}_arguments {json.dumps('}' + end)}",
            f"{name}_arguments: {arguments}",
        ]
    return rules


def _json_rule(schema: Mapping[str, Any], **layout: Any) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": layout})


def _schema(schema: dict[str, Any] | bool) -> dict[str, Any]:
    """`true` stands for anything."""
    return schema if isinstance(schema, dict) else {} if schema else {"enum": []}


def _parse_schema(given: str | dict[str, Any]) -> Mapping[str, Any]:
    try:
        schema = json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError):
        schema = None
    if not isinstance(schema, Mapping):
        raise ParameterError("structured_outputs", "need a JSON schema that is an object")
    return schema
