from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import click
import pytest

from foredraft.cli import main as cli
from foredraft.cli.options import debug_option
from foredraft.errors import DownloadError, ParameterError


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], None]:
    """`foredraft list` raises what the test gives."""

    def install(error: BaseException) -> None:
        def fail() -> None:
            raise error

        command = click.command("list")(debug_option(fail))
        monkeypatch.setattr(cli.CommandTable, "get_command", lambda self, ctx, name: command)

    return install


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (DownloadError("no network; try again"), 1, "foredraft: error: no network; try again"),
        (DownloadError("two\nlines"), 1, "foredraft: error: two lines"),
        (ParameterError("top_p", "must be above 0"), 2, "foredraft: error: top_p must be above 0"),
        (click.UsageError("give one"), 2, "foredraft: error: give one (see foredraft list --help)"),
        (FileNotFoundError(2, "No such file", "x.gguf"), 1, "foredraft: error: x.gguf: No such file"),
        (OSError(28, "No space left on device"), 1, "foredraft: error: input or output: No space left on device"),
        (MemoryError(), 1, "foredraft: error: out of memory; choose a smaller model or a smaller --max-model-len"),
    ],
)
def test_an_error_is_one_line_and_a_code(failing, capsys, error: BaseException, code: int, line: str) -> None:
    failing(error)
    assert cli.run(["list"]) == code
    captured = capsys.readouterr()
    assert captured.err.splitlines() == [line]
    assert captured.out == ""


def test_a_fault_of_ours_is_named_as_one(failing, capsys) -> None:
    failing(ZeroDivisionError("division by zero"))
    assert cli.run(["list"]) == 1
    assert capsys.readouterr().err.startswith("foredraft: error: ZeroDivisionError: division by zero (a fault of")


def test_debug_shows_the_traceback_before_the_line(failing, capsys) -> None:
    failing(DownloadError("no network"))
    assert cli.run(["list", "--debug"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("Traceback")
    assert lines[-1] == "foredraft: error: no network"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), click.Abort()])
def test_ctrl_c_is_130(failing, capsys, error: BaseException) -> None:
    failing(error)
    assert cli.run(["list"]) == 130
    assert capsys.readouterr().err.strip() == ""


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["genrate"], "no command 'genrate'; did you mean 'generate'? (see foredraft --help)"),
        (["xyzzy"], "no command 'xyzzy'; choose one of: demo, generate"),
        (["--nonsense"], "--nonsense"),
        (["generate", "--nonsense"], "(see foredraft generate --help)"),
        (["generate", "--ctx-size", "9"], "no option --ctx-size here: use -c/--max-model-len (see foredraft generate"),
        (["generate"], "Missing option '-m'"),
    ],
)
def test_bad_usage_is_one_line_and_2(capsys, args: list[str], words: str) -> None:
    assert cli.run(args) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert words in captured.err


def test_help_names_every_command(capsys) -> None:
    assert cli.run(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {name} " in text for name in cli.COMMANDS)
    assert cli.run([]) == 0
    assert capsys.readouterr().out == text


@pytest.mark.parametrize("name", sorted(cli.COMMANDS))
def test_every_command_has_help(capsys, name: str) -> None:
    assert cli.run([name, "--help"]) == 0
    assert f"Usage: foredraft {name}" in capsys.readouterr().out


@pytest.mark.parametrize("args", [["--help"], ["generate", "--help"], ["generate", "-m", "x", "--top-p", "0"]])
def test_help_and_usage_errors_load_nothing_heavy(args: list[str]) -> None:
    script = (
        "import sys\nfrom foredraft.cli.main import run\n"
        f"run({args!r})\n"
        "print(sorted({'numpy', 'tokenizers', 'torch', 'rich', 'jinja2', 'foredraft._native'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_reader_that_goes_away_is_no_error(start) -> None:
    with start("--help") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
