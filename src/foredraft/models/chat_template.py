"""Chat templates: Jinja programs that come with a model and turn messages into a prompt.

They are rendered as Transformers does it (`apply_chat_template`), in a sandbox, since a model file may be hostile: no
attribute of Python is in reach, and loops, macros, repetition and the output are bounded.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from foredraft.errors import ChatTemplateError
from foredraft.models.base import TextTokenizer
from foredraft.models.messages import template_messages, template_tools

MAX_STEPS = 200_000  # turns of loops and calls of macros in one rendering
MAX_CHARACTERS = 50_000_000  # of output and of texts put together on the way


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
) -> list[int]:
    """Token ids of a chat, ready for the answer. The messages are as clients write them (`models/messages.py`).

    Further arguments are those of `render_chat`; check: sees the text before it becomes tokens, and may raise. Raises
    ParameterError for what is no message, ChatTemplateError.

    Control tokens come from the template alone: a message that spells one means its letters, so that nobody ends a turn
    or speaks as the system from inside a message.
    """
    mark = str(secrets.randbits(96))  # in no message: nobody can guess it; no filter of a template changes digits

    def protect(text: str) -> str:
        return tokenizer.mark_special(text, mark)

    text = render_chat(
        tokenizer,
        [_each_text(message, protect) for message in template_messages(messages)],
        add_generation_prompt=add_generation_prompt,
        tools=template_tools(tools, tokenizer.chat_template),
        extra=extra,
    )
    if check is not None:
        check(text.replace(mark, ""))
    return tokenizer.encode(text, parse_special=True, mark=mark)


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
        return _Environment().from_string(template).render(variables)
    except ChatTemplateError:
        raise
    except Exception as error:  # whatever a template's expressions may raise, from TypeError to RecursionError
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ChatTemplateError(
            f"the chat template refused the messages: {reason[:300]}; change them, or give text as it is (--raw)"
        ) from None


_REPEATED: Any = (nodes.For, nodes.Macro, nodes.CallBlock)


class _Bounds(Extension):
    """Bounds loops, macros and text; tolerates {% generation %}, which marks what training looks at."""

    tags = {"generation"}  # noqa: RUF012 (the base class's attribute)

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.num_steps = 0
        self.num_characters = 0

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def bound(self, template: nodes.Template) -> nodes.Template:
        """Every turn of a loop and call of a macro counts itself and its literal text; every `~` its result."""
        repeated: Iterator[nodes.For | nodes.Macro | nodes.CallBlock] = template.find_all(_REPEATED)
        for node in repeated:
            literal = sum(len(data.data) for child in node.body for data in _literals(child))
            count = self.call_method("count_step", [nodes.Const(literal)])
            node.body.insert(0, nodes.ExprStmt(count, lineno=node.lineno))
        bounded: nodes.Template = _BoundConcat(self).visit(template)
        return bounded

    def count_step(self, literal: int) -> None:
        self.num_steps += 1
        if self.num_steps > MAX_STEPS:
            raise ChatTemplateError(
                f"the chat template does not end: it took {MAX_STEPS} steps; use another model file"
            )
        self.count_characters(literal)

    def count_characters(self, count: int) -> None:
        self.num_characters += count
        if self.num_characters > MAX_CHARACTERS:
            raise ChatTemplateError(f"the chat template makes over {MAX_CHARACTERS} characters; use another model file")

    def concat(self, *values: Any) -> str:
        texts = [str(value) for value in values]
        self.count_characters(sum(map(len, texts)))
        return "".join(texts)


class _BoundConcat(NodeTransformer):
    def __init__(self, bounds: _Bounds) -> None:
        self.bounds = bounds

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802 (the base class's naming)
        self.generic_visit(node)
        return self.bounds.call_method("concat", node.nodes, lineno=node.lineno)


def _literals(node: nodes.Node) -> Iterator[nodes.TemplateData]:
    if isinstance(node, nodes.TemplateData):
        yield node
    yield from node.find_all(nodes.TemplateData)


class _Environment(ImmutableSandboxedEnvironment):
    """One rendering's. Trimming, loop controls and the functions are Transformers'."""

    intercepted_binops = frozenset({"+", "*", "**"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"], finalize=_count_output
        )
        self.bounds = _Bounds(self)
        self.extensions[_Bounds.identifier] = self.bounds
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _refuse
        self.globals["strftime_now"] = _now

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        self.bounds.count_characters(len(source))
        return self.bounds.bound(super()._parse(source, name, filename))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        sizes = [len(value) if isinstance(value, Sequence) else abs(value) for value in (left, right)]
        if max(sizes) > MAX_CHARACTERS or (sizes[0] * sizes[1] > MAX_CHARACTERS and operator != "+"):
            raise ChatTemplateError("the chat template computes with too large values; use another model file")
        if operator == "**" and sizes[1] > 64:
            raise ChatTemplateError("the chat template computes with too large powers; use another model file")
        result = super().call_binop(context, operator, left, right)
        if isinstance(result, str):
            self.bounds.count_characters(len(result))
        return result


@jinja2.pass_context  # which also keeps constants from being folded before they are counted
def _count_output(context: Context, value: Any) -> Any:
    if isinstance(value, str) and isinstance(context.environment, _Environment):
        context.environment.bounds.count_characters(len(value))
    return value


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(format: str) -> str:
    return datetime.now().strftime(format)


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
