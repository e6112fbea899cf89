from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.models.hf.folders import write_folder

from foredraft.cli.main import run
from foredraft.testing import make_tiny_gguf

ARGS = ("chat", "-m", "tiny", "-n", "8", "--ignore-eos")


def turns(tiny) -> list[str]:
    """The rendered prompts of the conversation, as text."""
    tokenizer = tiny[-1].tokenizer
    marks = {tokenizer.USER: "U:", tokenizer.ASSISTANT: "A:", tokenizer.SYSTEM: "S:", tokenizer.END: "|"}
    return ["".join(marks.get(t, chr(t) if t < 128 else "?") for t in prompt) for prompt in tiny[-1].prompts]


def test_each_line_of_stdin_is_a_turn_and_earlier_turns_are_kept(tiny, capsys, stdin) -> None:
    stdin(b"hello\n\nagain\n")
    assert run(ARGS) == 0
    first, second = turns(tiny)
    assert first == "U:hello|A:"
    assert second.startswith("U:hello|A:")
    assert second.endswith("|U:again|A:")
    captured = capsys.readouterr()
    assert captured.err.count("[8 tokens, ") == 2
    assert "tokens/s" not in captured.out


def test_answers_go_to_stdout_as_the_library_gives_them(tiny, capsys, stdin) -> None:
    stdin(b"hello\n")
    assert run(ARGS) == 0
    text = tiny[-1].chat([{"role": "user", "content": "hello"}], tiny[-1].requests[0])[0].text
    assert capsys.readouterr().out == text + "\n"


def test_exit_and_clear(tiny, capsys, stdin) -> None:
    stdin(b"hello\n/clear\nagain\n/exit\nnever\n")
    assert run([*ARGS, "--system", "be brief"]) == 0
    assert turns(tiny) == ["S:be brief|U:hello|A:", "S:be brief|U:again|A:"]


def test_help_is_there_without_a_terminal(tiny, capsys, stdin) -> None:
    stdin(b"/help\n/what\n")
    assert run(ARGS) == 0
    assert capsys.readouterr().err.startswith("/exit ends the conversation")
    assert turns(tiny)[0].startswith("U:/what")


def test_a_turn_that_is_not_utf8_is_refused(tiny, capsys, stdin) -> None:
    stdin(b"hello\r\ncaf\xe9\nnever\n")
    assert run(ARGS) == 2
    assert "line 2 of standard input is not UTF-8 text (byte 3)" in capsys.readouterr().err
    assert turns(tiny) == ["U:hello|A:"]


def test_what_only_json_shows_is_no_flag(capsys) -> None:
    assert run(["chat", "--help"]) == 0
    assert "--logprobs" not in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["gguf", "folder", "folder of Transformers"])
def test_a_model_without_a_template_is_refused_before_it_is_repacked(
    kind: str, tmp_path: Path, home: Path, capsys, stdin
) -> None:
    path = tmp_path / "tiny.gguf"
    if kind == "gguf":
        make_tiny_gguf("llama", path)
        path.write_bytes(path.read_bytes().replace(b"tokenizer.chat_template", b"tokenizer.another_thing"))
    else:
        sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16} if kind == "folder" else {}
        path = write_folder(tmp_path / "folder", settings=sizes)
        (path / "chat_template.jinja").unlink()
    stdin(b"hello\n")
    capsys.readouterr()
    assert run(["chat", "-m", str(path)]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == f"foredraft: error: {path} has no chat template; use foredraft generate --raw\n"
    assert not home.exists()


def test_a_turn_too_long_fails_where_nobody_can_clear(tiny, capsys, stdin) -> None:
    stdin(b"x" * 600 + b"\n")
    assert run(ARGS) == 1
    assert len(capsys.readouterr().err.splitlines()) == 1


class Terminal:
    """Standard input of a person who types these lines."""

    def __init__(self, lines: list[str]) -> None:
        self._lines = iter(lines)

    def isatty(self) -> bool:
        return True

    def read_line(self, prompt: str = "") -> str:
        try:
            return next(self._lines)
        except StopIteration:
            raise EOFError from None


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch):
    def install(*lines: str) -> None:
        terminal = Terminal(list(lines))
        monkeypatch.setattr(sys, "stdin", terminal)
        monkeypatch.setattr("builtins.input", terminal.read_line)

    return install


def test_a_person_may_go_on_after_a_turn_too_long(tiny, capsys, typed) -> None:
    typed("x" * 600, "hello", "/what")
    assert run(ARGS) == 0
    err = capsys.readouterr().err
    assert "/clear makes room" in err
    assert err.count("/exit ends the conversation") == 2
    assert err.endswith("\n> \n")  # Ctrl-D ends the prompt's line
    assert turns(tiny)[1] == "U:hello|A:"


def test_ctrl_c_stops_an_answer_and_the_next_one_ends(tiny, capsys, typed, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []

    def interrupt_once(text: str) -> None:
        written.append(text)
        if len(written) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr("foredraft.cli.chat.write_answer", interrupt_once)
    typed("hello", "again")
    assert run(ARGS) == 0
    assert "[stopped]" in capsys.readouterr().err
    assert len(tiny[-1].prompts) == 2
    tiny[-1].engine.check_integrity()

    def interrupt(prompt: str = "") -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", interrupt)
    assert run(ARGS) == 130
