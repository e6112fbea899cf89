"""The sandbox in which chat templates run: Transformers' environment, bounded in time and memory.

A template can make much of little in three ways, and each is counted before it happens:
turns of loops and calls of macros (`count_step`); operators, methods and filters whose result is larger than what they
are given (`+ * ** % ~`, join, replace, format, indent, tojson), by the size that it will have; and everything else by
what it reads and what it returns. Methods and filters that pad or lay out text are out of reach.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
import string
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
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

MAX_STEPS = 200_000  # turns of loops and calls of macros in one rendering; parts of one value
MAX_CHARACTERS = 50_000_000  # of output and of texts read and made on the way
MAX_DEPTH = 64  # of lists in lists
MAX_INDENT = 16
MAX_POWER = 64

#: Methods that pad, and those that lead to types with more of them.
_METHODS_OUT = frozenset(
    ("ljust", "rjust", "center", "zfill", "expandtabs", "translate", "format_map", "encode", "to_bytes")
)
_FILTERS_OUT = ("batch", "center", "filesizeformat", "format", "pprint", "slice", "urlize", "wordwrap", "xmlattr")
#: Filters that write values of any kind.
_WRITERS = frozenset(
    (
        *("capitalize", "e", "escape", "forceescape", "indent", "lower", "replace", "safe"),
        *("string", "striptags", "title", "trim", "truncate", "upper", "urlencode", "wordcount"),
    )
)
#: A width or precision of four digits, or one that comes from the values: after `%`, and in a field of `format`.
_WIDE_PERCENT = re.compile(r"[%)][-#0 +.\d]*(\d{4}|\*)")
_WIDE_FIELD = re.compile(r"\d{4}|\{")
_MAX_WIDTH = 999

_REPEATED: Any = (nodes.For, nodes.Macro, nodes.CallBlock)


class Bounds(Extension):
    """What one rendering has used up; tolerates {% generation %}, which marks what training looks at."""

    tags = {"generation"}  # noqa: RUF012 (the base class's attribute)

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.num_steps = 0
        self.num_characters = 0

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def bound(self, template: nodes.Template) -> nodes.Template:
        """Turns of loops and calls of macros count themselves and literal text, every `~` and slice its result."""
        repeated: Iterator[nodes.For | nodes.Macro | nodes.CallBlock] = template.find_all(_REPEATED)
        for node in repeated:
            literal = sum(len(data.data) for child in node.body for data in _literals(child))
            count = self.call_method("count_step", [nodes.Const(literal)])
            node.body.insert(0, nodes.ExprStmt(count, lineno=node.lineno))
        bounded: nodes.Template = _CountedNodes(self).visit(template)
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

    def counted(self, value: Any) -> Any:
        """The value, whose length is counted."""
        if isinstance(value, Sized) and not isinstance(value, jinja2.Undefined):
            self.count_characters(len(value))
        return value

    def concat(self, *values: Any) -> str:
        for value in values:
            self.count_characters(written_size(value)[0])
        return "".join(map(str, values))

    def count_format(self, text: str, is_wide: bool, num_fields: int, values: Any) -> None:
        """Before values are put into the fields of a text."""
        if is_wide:
            raise ChatTemplateError("the chat template formats with too large a width; use another model file")
        self.count_characters(len(text) + num_fields * (written_size(values)[0] + _MAX_WIDTH))

    def count_method(self, text: str, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Before a method of a text is called."""
        self.count_characters(len(text) + sum(len(arg) for arg in args if isinstance(arg, Sized)))
        if name == "replace":
            self.count_characters(text.count(args[0]) * len(args[1]))
        elif name == "join":
            self.count_join(text, args[0])
        elif name == "format":
            is_wide = any(_WIDE_FIELD.search(spec or "") for _, _, spec, _ in string.Formatter().parse(text))
            self.count_format(text, is_wide, text.count("{"), [args, kwargs])

    def count_join(self, separator: str, parts: Sequence[Any]) -> None:
        size, num_parts = written_size(parts)
        self.count_characters(size + num_parts * len(separator))


class _CountedNodes(NodeTransformer):
    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802 (the base class's naming)
        self.generic_visit(node)
        return self.bounds.call_method("concat", node.nodes, lineno=node.lineno)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        return self.bounds.call_method("counted", [node], lineno=node.lineno)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """One rendering's. Trimming, loop controls and the functions are Transformers'."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"], finalize=_count_output
        )
        self.bounds = Bounds(self)
        self.extensions[Bounds.identifier] = self.bounds
        self.filters["tojson"] = _to_json
        for name in _FILTERS_OUT:
            del self.filters[name]
        self.filters.update({name: self._counted_filter(name, filter) for name, filter in self.filters.items()})
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _refuse
        self.globals["strftime_now"] = _now

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        self.bounds.count_characters(len(source))
        return self.bounds.bound(super()._parse(source, name, filename))

    def _counted_filter(self, name: str, filter: Callable[..., Any]) -> Callable[..., Any]:
        forecast = _FORECASTS.get(name)
        signature = inspect.signature(filter) if forecast else None

        @functools.wraps(filter)
        def counted(*args: Any, **kwargs: Any) -> Any:
            for value in (*args, *kwargs.values()):
                if isinstance(value, str) or name in _WRITERS:
                    self.bounds.count_characters(written_size(value)[0])
            if forecast and signature:
                call = signature.bind(*args, **kwargs)
                call.apply_defaults()
                forecast(self.bounds, call.arguments)
                args, kwargs = call.args, call.kwargs
            return self.bounds.counted(filter(*args, **kwargs))

        return counted

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in _METHODS_OUT and super().is_safe_attribute(obj, attr, value)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        method = getattr(obj, "__wrapped__", obj)  # Jinja wraps str.format
        text = getattr(method, "__self__", None)
        if isinstance(text, str):
            if method.__name__ == "join":
                args = tuple(list(arg) for arg in args)  # what is read once cannot be counted before
            self.bounds.count_method(text, method.__name__, args, kwargs)
        return self.bounds.counted(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            self.bounds.count_format(left, bool(_WIDE_PERCENT.search(left)), left.count("%"), right)
        else:
            _check_operands(operator, left, right)
        return self.bounds.counted(super().call_binop(context, operator, left, right))


def _check_operands(operator: str, left: Any, right: Any) -> None:
    sizes = [len(value) if isinstance(value, Sequence) else abs(value) for value in (left, right)]
    if max(sizes) > MAX_CHARACTERS or (sizes[0] * sizes[1] > MAX_CHARACTERS and operator in ("*", "**")):
        raise ChatTemplateError("the chat template computes with too large values; use another model file")
    if operator == "**" and sizes[1] > MAX_POWER:
        raise ChatTemplateError("the chat template computes with too large powers; use another model file")


def written_size(value: Any) -> tuple[int, int]:
    """Characters of a value when it is written, at least, and its parts. Raises ChatTemplateError for too many.

    A value may hold another many times over, and so be far larger written than it is in memory.
    """
    num_characters, num_parts = 0, 0
    waiting = [(value, 0)]
    while waiting:
        item, depth = waiting.pop()
        num_parts += 1
        if isinstance(item, str):
            num_characters += len(item)
        elif isinstance(item, Mapping):
            waiting += [(part, depth + 1) for pair in item.items() for part in pair]
        elif isinstance(item, list | tuple):
            waiting += [(part, depth + 1) for part in item]
        elif isinstance(item, int):
            num_characters += item.bit_length() // 3 + 1
        if depth > MAX_DEPTH or num_parts + len(waiting) > MAX_STEPS:
            raise ChatTemplateError("the chat template makes a value of too many parts; use another model file")
    return num_characters + num_parts, num_parts


def _forecast_join(bounds: Bounds, call: dict[str, Any]) -> None:
    call["value"] = list(call["value"])
    bounds.count_join(str(call["d"]), call["value"])


def _forecast_replace(bounds: Bounds, call: dict[str, Any]) -> None:
    bounds.count_characters(str(call["s"]).count(str(call["old"])) * len(str(call["new"])))


def _forecast_indent(bounds: Bounds, call: dict[str, Any]) -> None:
    bounds.count_characters((str(call["s"]).count("\n") + 1) * _width(call["width"]))


def _forecast_to_json(bounds: Bounds, call: dict[str, Any]) -> None:
    size, num_parts = written_size(call["value"])
    width = _width(call["indent"] or 0)
    if width > MAX_INDENT:
        raise ChatTemplateError(f"the chat template indents JSON by over {MAX_INDENT}; use another model file")
    bounds.count_characters(size + num_parts * sum(map(len, call["separators"] or ())))


def _forecast_sum(bounds: Bounds, call: dict[str, Any]) -> None:
    call["iterable"] = list(call["iterable"])
    if not isinstance(call["start"], int | float):  # lists, each sum of which is a copy
        size, num_parts = written_size(call["iterable"])
        bounds.count_characters(size * num_parts)


def _forecast_round(_: Bounds, call: dict[str, Any]) -> None:
    if abs(call["precision"]) > MAX_POWER:
        raise ChatTemplateError("the chat template rounds to too many digits; use another model file")


def _width(indent: Any) -> int:
    return len(indent) if isinstance(indent, str) else int(indent)


#: Filters that make more than they are given: what they count before they work.
_FORECASTS: dict[str, Callable[[Bounds, dict[str, Any]], None]] = {
    "join": _forecast_join,
    "replace": _forecast_replace,
    "indent": _forecast_indent,
    "tojson": _forecast_to_json,
    "sum": _forecast_sum,
    "round": _forecast_round,
}


def _literals(node: nodes.Node) -> Iterator[nodes.TemplateData]:
    if isinstance(node, nodes.TemplateData):
        yield node
    yield from node.find_all(nodes.TemplateData)


@jinja2.pass_context  # which also keeps constants from being folded before they are counted
def _count_output(context: Context, value: Any) -> Any:
    if isinstance(context.environment, TemplateEnvironment):
        context.environment.bounds.count_characters(written_size(value)[0])
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
