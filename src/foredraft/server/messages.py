"""The text of an answer as a message: thought, content and calls, at once or piece by piece."""

from __future__ import annotations

from dataclasses import dataclass
from secrets import token_hex

from foredraft.server.answers import MessageReport, ToolCall, ToolCallFunction
from foredraft.server.constraints import ToolUse
from foredraft.server.reasoning import ReasoningReader, Thinking, Thought
from foredraft.server.tool_calls import CallDelta, Delta, ToolCallReader


@dataclass(frozen=True, slots=True)
class MessageShape:
    """What to look for in the answers of one request. Neither thinking nor tools: the text is the content."""

    thinking: Thinking | None = None
    tools: ToolUse | None = None
    include_reasoning: bool = True


class MessageReader:
    """Reads one choice."""

    def __init__(self, shape: MessageShape) -> None:
        self._shape = shape
        self._thoughts = ReasoningReader(shape.thinking) if shape.thinking is not None else None
        self._calls: ToolCallReader | None = None
        if shape.tools is not None:
            names = frozenset(function.name for function in shape.tools.functions)
            tools = shape.tools
            self._calls = ToolCallReader(names, max_num_calls=tools.max_num_calls, is_demanded=tools.is_required)

    def whole(self, text: str) -> MessageReport:
        """The message of a text that is complete."""
        thought, delta = self._read(text, is_last=True)
        message = MessageReport(role="assistant", content=delta.content)
        if self._thoughts is not None and self._shape.include_reasoning:
            message.reasoning_content = thought or None
        if delta.calls:
            message.content = delta.content or None
            message.tool_calls = [_report_call(call) for call in delta.calls]
        return message

    def piece(self, text: str, *, is_first: bool, is_last: bool) -> MessageReport:
        """What a piece of the text adds."""
        thought, delta = self._read(text, is_last=is_last)
        message = MessageReport()
        if is_first:
            message.role = "assistant"
        if delta.content or (self._thoughts is None and self._calls is None):
            message.content = delta.content
        if thought and self._shape.include_reasoning:
            message.reasoning_content = thought
        if delta.calls:
            message.tool_calls = [_report_call_delta(call) for call in delta.calls]
        return message

    def finish_reason(self, reason: str | None) -> str | None:
        """The engine's, unless the text ended to have tools called."""
        return "tool_calls" if reason == "stop" and self._calls is not None and self._calls.has_calls else reason

    def _read(self, text: str, *, is_last: bool) -> tuple[str, Delta]:
        thought = Thought(content=text)
        if self._thoughts is not None:
            thought = self._thoughts.feed(text)
            if is_last:
                rest = self._thoughts.finish()
                thought = Thought(thought.reasoning + rest.reasoning, thought.content + rest.content)
        if self._calls is None:
            return thought.reasoning, Delta(thought.content)
        delta = self._calls.feed(thought.content)
        return thought.reasoning, delta + self._calls.finish() if is_last else delta


def _report_call(call: CallDelta) -> ToolCall:
    function = ToolCallFunction(name=call.name, arguments=call.arguments)
    return ToolCall(id=_call_id(), type="function", function=function)


def _report_call_delta(call: CallDelta) -> ToolCall:
    if call.name is None:
        return ToolCall(index=call.index, function=ToolCallFunction(arguments=call.arguments))
    function = ToolCallFunction(name=call.name, arguments=call.arguments)
    return ToolCall(index=call.index, id=_call_id(), type="function", function=function)


def _call_id() -> str:
    return f"call_{token_hex(12)}"
