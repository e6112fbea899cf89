"""Calls of tools in the text of an answer, as the catalogue's models write them.

    <tool_call>                                              Qwen, Hermes and others: any number of them
    {"name": "weather", "arguments": {"city": "Rome"}}
    </tool_call>
    {"name": "weather", "parameters": {"city": "Rome"}}      a bare object, or a fenced one, where an answer begins

Arguments are the model's own JSON text. A reader takes an answer in pieces of any size and gives the same calls and the
same content for each way to cut it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from foredraft.server.reasoning import num_held

OPEN, CLOSE, FENCE = "<tool_call>", "</tool_call>", "```"

_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')
_BARE = re.compile(r"\s*(?:```(?:json)?\s*)?(?=\{)")
_BARE_SO_FAR = re.compile(r"\s*(?:`{0,2}|```(?:j|js|jso|json)?\s*)")
_BARE_HEAD = '{"name":"'


@dataclass(frozen=True, slots=True)
class CallDelta:
    """What is added to the call of this number. `name` comes with its beginning."""

    index: int
    name: str | None = None
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class Delta:
    """What a piece of text adds to the content and to the calls, at most one entry a call."""

    content: str = ""
    calls: tuple[CallDelta, ...] = ()

    def __add__(self, other: Delta) -> Delta:
        """`other` comes after: it goes on with no call of this one."""
        return Delta(self.content + other.content, self.calls + other.calls)


@dataclass(slots=True)
class _Object:
    """Finds the end of a JSON object in a text that grows."""

    end: int = 0  # of what was looked at; of the object, once it has ended
    depth: int = 0
    in_string: bool = False
    is_escaped: bool = False

    def ends_in(self, text: str) -> bool:
        """text: all of it so far."""
        for i in range(self.end, len(text)):
            char = text[i]
            if self.in_string:
                self.in_string = self.is_escaped or char != '"'
                self.is_escaped = char == "\\" and not self.is_escaped
            elif char == '"':
                self.in_string = True
            elif char in "{[":
                self.depth += 1
            elif char in "}]":
                self.depth -= 1
                if self.depth == 0:
                    self.end = i + 1
                    return True
        self.end = len(text)
        return False


@dataclass
class ToolCallReader:
    """Parts an answer into content and calls of the tools of these `names`; what is no call of them is content.

        text ──opener──► head ──name, arguments:──► arguments ──object ends──► tail ──closers──► text
          ▲               │
          └──no call──────┘

    Blanks before, between and behind calls are layout. Once a call's head is through, its arguments flow.
    """

    names: Collection[str]
    max_num_calls: int | None = None
    is_demanded: bool = False  # the text is nothing but calls
    _state: Literal["text", "head", "arguments", "tail"] = "text"
    _buffer: str = ""  # not yet read
    _opener: str = ""  # what brought us to the head, with the blanks before it
    _closers: list[str] = field(default_factory=list)
    _object: _Object = field(default_factory=_Object)
    _has_content: bool = False
    _num_calls: int = 0
    _content: list[str] = field(default_factory=list)  # of this piece
    _calls: list[CallDelta] = field(default_factory=list)

    @property
    def has_calls(self) -> bool:
        return self._num_calls > 0

    def feed(self, text: str) -> Delta:
        self._buffer += text
        steps = {
            "text": self._read_text,
            "head": self._read_head,
            "arguments": self._read_arguments,
            "tail": self._read_tail,
        }
        while steps[self._state]():
            pass
        return self._take()

    def finish(self) -> Delta:
        """No more text. What was held to become a call is content, unless it is clear that it was cut off."""
        rest, self._buffer = self._buffer, ""
        if self._state == "head":
            if not (self.is_demanded or (self.has_calls and OPEN in self._opener)):
                self._write(self._opener + rest)
        elif self._state == "text" and not ((self.has_calls and rest.isspace()) or self.is_demanded):
            self._write(rest)
        return self._take()

    def _take(self) -> Delta:
        delta = Delta("".join(self._content), tuple(self._calls))
        self._content.clear()
        self._calls.clear()
        return delta

    def _write(self, text: str) -> None:
        if not self._has_content and self.has_calls:
            text = text.lstrip()
        self._has_content = self._has_content or bool(text.strip())
        self._content.append(text)

    # Each step returns whether another may follow; False: it needs more text.

    def _read_text(self) -> bool:
        if self._num_calls == self.max_num_calls:
            self._buffer = ""  # nothing comes behind the last call
            return False
        if not self._has_content:
            bare = _BARE.match(self._buffer)
            if bare is not None:
                is_fenced = FENCE in bare[0]
                return self._enter_head(bare[0], self._buffer[bare.end() :], ["}", FENCE] if is_fenced else ["}"])
            if _BARE_SO_FAR.fullmatch(self._buffer):
                return False
        before, tag, rest = self._buffer.partition(OPEN)
        if tag:
            content = before.rstrip()
            self._write(content)
            return self._enter_head(before[len(content) :] + tag, rest, ["}", CLOSE])
        end = len(before[: len(before) - num_held(before, OPEN)].rstrip())
        self._write(before[:end])
        self._buffer = before[end:]
        return False

    def _enter_head(self, opener: str, rest: str, closers: list[str]) -> bool:
        self._state, self._opener, self._buffer, self._closers = "head", opener, rest, closers
        self._object = _Object()
        return True

    def _read_head(self) -> bool:
        head = _HEAD.match(self._buffer)
        if head is not None:
            name = _parse(head[1])
            if name not in self.names:
                return self._reject()
            self._begin_call(name, "")
            self._state, self._object = "arguments", _Object()
            self._buffer = self._buffer[head.end() :]
            return True
        begin = self._buffer.lstrip()
        if OPEN not in self._opener and not _may_be_bare_call(begin, self.names):
            return self._reject()
        if begin and not begin.startswith("{"):
            return self._reject()
        if not self._object.ends_in(self._buffer):
            return False
        call = _whole_call(self._buffer[: self._object.end])
        if call is None or call[0] not in self.names:
            return self._reject()
        self._begin_call(*call)
        self._state, self._buffer = "tail", self._buffer[self._object.end :]
        del self._closers[0]  # the object's own end
        return True

    def _reject(self) -> bool:
        self._write(self._opener)
        self._state, self._has_content = "text", True
        return True

    def _begin_call(self, name: str, arguments: str) -> None:
        self._calls.append(CallDelta(self._num_calls, name, arguments))
        self._num_calls += 1

    def _read_arguments(self) -> bool:
        """The buffer begins where the last piece ended, so the object is told of its beginning anew."""
        self._object.end = 0
        has_ended = self._object.ends_in(self._buffer)
        piece, self._buffer = self._buffer[: self._object.end], self._buffer[self._object.end :]
        last = self._calls[-1] if self._calls else None
        if last is not None and last.index == self._num_calls - 1:
            self._calls[-1] = replace(last, arguments=last.arguments + piece)
        elif piece:
            self._calls.append(CallDelta(self._num_calls - 1, arguments=piece))
        self._state = "tail" if has_ended else "arguments"
        return has_ended

    def _read_tail(self) -> bool:
        while self._closers:
            rest = self._buffer.lstrip()
            if rest.startswith(self._closers[0]):
                self._buffer = rest[len(self._closers.pop(0)) :]
            elif self._closers[0].startswith(rest):
                return False
            else:
                break  # the model forgot it
        self._state = "text"
        return True


def _may_be_bare_call(text: str, names: Collection[str]) -> bool:
    """Whether an object that begins like this may be a call: others are content at once, not when they end."""
    compact = "".join(text[:200].split())
    if not compact.startswith(_BARE_HEAD):
        return _BARE_HEAD.startswith(compact)
    name, quote, _ = text.split('"', 3)[3].partition('"')
    return name in names if quote else any(known.startswith(name) for known in names)


def _whole_call(text: str) -> tuple[str, str] | None:
    """Name and arguments of an object whose keys come in another order, or whose arguments are absent or quoted."""
    call = _parse(text)
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments", call.get("parameters"))
    if isinstance(arguments, str):
        arguments = _parse(arguments)
    if arguments is None:
        arguments = {}
    return (call["name"], json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None


def _parse(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
