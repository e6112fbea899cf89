"""`foredraft chat`: a conversation. The cache of earlier turns is reused by the engine, which knows their tokens."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import click

from foredraft.cli.console import Session, hold_log, note, read_lines, write_answer
from foredraft.cli.images import blaming_files, image_option, user_message
from foredraft.cli.options import EngineOptions, debug_option, engine_options, open_llm, sampling_options
from foredraft.cli.words import summarise
from foredraft.errors import ParameterError, PromptTooLongError
from foredraft.types import SamplingParams

if TYPE_CHECKING:
    from foredraft.engine.llm import LLM

HELP = (
    "/exit ends the conversation, /clear forgets it, /image FILE shows one, /help shows this; Ctrl-C stops an answer."
)


@click.command("chat")
@engine_options
@click.option("--system", metavar="TEXT", help="Instructions that precede the conversation.")
@image_option
@sampling_options
@debug_option
@click.pass_obj
def command(
    session: Session, options: EngineOptions, params: SamplingParams, system: str | None, images: Sequence[str]
) -> None:
    """Talk with a model. Answers go to stdout; without a terminal each line of stdin is a turn.

    Images belong to the first turn; /image FILE adds one to the next.
    """
    llm = open_llm(options, session, chats=True)
    conversation = Conversation(llm, params, system, images)
    is_interactive = sys.stdin.isatty()
    if is_interactive:
        note(HELP)
    for line in _lines(is_interactive):
        if line == "/exit":
            break
        if line == "/clear":
            conversation.clear()
            note("[forgotten]")
        elif line.startswith("/image "):
            conversation.images.append(line.removeprefix("/image ").strip())
        elif line == "/help" or (line.startswith("/") and is_interactive):
            note(HELP)
        elif line.strip():
            _answer(conversation, line, is_interactive)


class Conversation:
    """The messages so far. Invariant between turns: user and assistant alternate, the assistant last.

    images: files that the next turn shows.
    """

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None, images: Sequence[str] = ()) -> None:
        self._llm = llm
        self._params = params
        self._opening: list[dict[str, Any]] = [{"role": "system", "content": system}] if system is not None else []
        self.messages = list(self._opening)
        self.images = list(images)

    def clear(self) -> None:
        self.messages = list(self._opening)

    def answer(self, text: str) -> str | None:
        """Streams the answer to stdout. Returns a summary; None if Ctrl-C cut it short (what was said then stays)."""
        said: list[str] = []
        summary = None
        turn = [*self.messages, user_message(text, self.images)]
        self.images = []
        with blaming_files(turn):
            chunks = self._llm.stream_chat(turn, self._params)
        try:
            for chunk in chunks:
                said.append(chunk.text)
                write_answer(chunk.text)
                if chunk.completion is not None:
                    summary = summarise(chunk.completion)
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
        self.messages = [*turn, {"role": "assistant", "content": "".join(said)}]
        write_answer("\n")
        return summary


def _answer(conversation: Conversation, text: str, is_interactive: bool) -> None:
    try:
        with hold_log():
            summary = conversation.answer(text)
        note(summary or "[stopped]")
    except PromptTooLongError as error:
        if not is_interactive:
            raise
        note(f"{error}; /clear makes room")
    except ParameterError as error:  # of an image
        if not is_interactive:
            raise
        note(str(error))


def _lines(is_interactive: bool) -> Iterator[str]:
    """Turns, until the end of stdin. Prompts for them on a terminal."""
    if not is_interactive:
        yield from read_lines()
        return
    import readline  # noqa: F401 (gives input() history and editing)

    prompt = "\n> "
    while True:
        if not sys.stdout.isatty():  # input() would write the prompt among the answers
            print(prompt, end="", file=sys.stderr, flush=True)
        try:
            yield input(prompt if sys.stdout.isatty() else "")
        except EOFError:
            # Ctrl-D leaves the prompt's line open.
            print(file=sys.stdout if sys.stdout.isatty() else sys.stderr, flush=True)
            return
