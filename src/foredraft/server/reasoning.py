"""Thinking aloud: what a model writes between <think> and </think> is `reasoning_content`, the rest is the answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from foredraft.models.base import TextTokenizer

OPEN, CLOSE = "<think>", "</think>"

#: Where a prompt leaves the answer: inside a thought, behind one, or where one may begin.
Thinking = Literal["inside", "over", "possible"]


def thinking_after(tokenizer: TextTokenizer, prompt: Sequence[int]) -> Thinking | None:
    """What the end of a prompt says; None for a model whose template does not think."""
    if OPEN not in (tokenizer.chat_template or ""):
        return None
    end = b"".join(map(tokenizer.token_bytes, prompt[-16:])).decode("utf-8", "replace").rstrip()
    return "inside" if end.endswith(OPEN) else "over" if end.endswith(CLOSE) else "possible"


@dataclass(frozen=True, slots=True)
class Thought:
    """What a piece of text adds to each."""

    reasoning: str = ""
    content: str = ""


class ReasoningReader:
    """Parts an answer, however it is cut into pieces. Blanks just inside the tags and behind them are layout.

    possible ──<think>──► inside ──</think>──► behind ──any text──► over
       └────────────────────────any other text─────────────────────►─┘
    """

    def __init__(self, thinking: Thinking) -> None:
        self._state: Literal["possible", "inside", "behind", "over"] = thinking
        self._held = ""
        self._has_begun = False  # to write a thought

    def feed(self, text: str) -> Thought:
        reasoning = ""
        text = self._held + text
        self._held = ""
        if self._state == "possible":
            begin = text.lstrip()
            if begin.startswith(OPEN):
                self._state, text = "inside", begin[len(OPEN) :]
            elif OPEN.startswith(begin):
                self._held = text
                return Thought()
            else:
                self._state = "over"
        if self._state == "inside":
            reasoning, text = self._read_thought(text)
        if self._state == "behind":
            text = text.lstrip()
            self._state = "over" if text else "behind"
        return Thought(reasoning, text if self._state == "over" else "")

    def finish(self) -> Thought:
        """No more text."""
        held, self._held = self._held, ""
        return Thought(reasoning=held) if self._state == "inside" else Thought(content=held)

    def _read_thought(self, text: str) -> tuple[str, str]:
        """The thought, and what follows it; what may belong to the end is held."""
        if not self._has_begun:
            text = text.lstrip()
            self._has_begun = bool(text)
        thought, close, rest = text.partition(CLOSE)
        if close:
            self._state = "behind"
            return thought.rstrip(), rest
        end = len(text[: len(text) - num_held(text, CLOSE)].rstrip())
        self._held = text[end:]
        return text[:end], ""


def num_held(text: str, tag: str) -> int:
    """Characters at the end of `text` that may yet become `tag`."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)
