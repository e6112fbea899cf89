"""The `foredraft` command: its table of commands, and the one place where an error becomes a line and an exit code.

Exit codes: 0 done, 1 it failed, 2 bad usage, 130 Ctrl-C, 143 SIGTERM. A command's module is imported when the command
runs.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

import click

from foredraft.cli.console import Session, prepare_streams
from foredraft.errors import ForedraftError

INTERRUPTED = 130

#: name -> what `foredraft --help` says. The command is `command` in the module of the same name, `_` for `-`.
COMMANDS = {
    "demo": "Answer a prompt plain and speculative, and compare.",
    "generate": "Answer one prompt.",
    "chat": "Talk with a model.",
    "serve": "Serve a model over the OpenAI API.",
    "bench": "Measure speculation against plain decoding.",
    "check-pair": "Tell whether a model can draft for another, and when it pays.",
    "pull": "Download models.",
    "list": "Show the models on this machine.",
    "rm": "Remove models and what was made from them.",
    "doctor": "Show what this machine and this installation can do.",
}


#: Flags of vLLM and llama.cpp -> ours.
FOREIGN_FLAGS = {
    "--ctx-size": "use -c/--max-model-len",
    "--draft-max": "use -k/--num-speculative-tokens",
    "--model-draft": "use -d model:NAME",
    "--n-gpu-layers": "the core runs on the CPU",
    "--gpu-memory-utilization": "the core runs on the CPU",
}


class CommandTable(click.Group):
    """A group that knows its commands by name and imports only the one that runs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"foredraft.cli.{cmd_name.replace('-', '_')}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in COMMANDS and not name.startswith("-"):
            close = difflib.get_close_matches(name, COMMANDS, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"choose one of: {', '.join(COMMANDS)}"
            raise click.UsageError(f"no command {name!r}; {hint}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


def _print_version(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    if not value or ctx.resilient_parsing:
        return
    try:
        click.echo(importlib.metadata.version("foredraft"))
    except importlib.metadata.PackageNotFoundError:
        click.echo("not installed (running from its sources)")
    ctx.exit()


@click.group(cls=CommandTable, no_args_is_help=False, invoke_without_command=True)
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Show it.")
@click.pass_context
def group(ctx: click.Context) -> None:
    """Lossless speculative decoding: the output of the target model, sooner."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def run(args: Sequence[str] | None = None) -> int:
    """Runs one command line (that of the process if None). Returns the exit code."""
    session = Session()
    log = logging.StreamHandler(sys.stderr)
    log.setFormatter(logging.Formatter("foredraft: %(message)s"))
    logger = logging.getLogger("foredraft")
    logger.addHandler(log)
    logger.setLevel(logging.WARNING)
    try:
        return _run(args, session)
    finally:
        logger.removeHandler(log)


def _run(args: Sequence[str] | None, session: Session) -> int:
    try:
        code = group.main(args, prog_name="foredraft", standalone_mode=False, obj=session)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except (KeyboardInterrupt, click.Abort):
        return INTERRUPTED
    except BrokenPipeError:
        return 1
    except click.UsageError as error:
        return _fail(error, session, _usage_line(error), 2)
    except ForedraftError as error:
        return _fail(error, session, str(error), error.exit_code)
    except MemoryError as error:
        return _fail(error, session, "out of memory; choose a smaller model or a smaller --max-model-len", 1)
    except OSError as error:
        return _fail(error, session, f"{error.filename or 'input or output'}: {error.strerror or error}", 1)
    except Exception as error:
        problem = f"{type(error).__name__}: {error} (a fault of foredraft; please report it with --debug's traceback)"
        return _fail(error, session, problem, 1)


def _usage_line(error: click.UsageError) -> str:
    message = error.format_message().rstrip(".")
    if isinstance(error, click.NoSuchOption) and error.option_name in FOREIGN_FLAGS:
        message = f"no option {error.option_name} here: {FOREIGN_FLAGS[error.option_name]}"
    return f"{message} (see {error.ctx.command_path} --help)" if error.ctx else message


def _fail(error: BaseException, session: Session, message: str, code: int) -> int:
    if session.debug:
        traceback.print_exception(error)
    print("foredraft: error:", " ".join(message.split()), file=sys.stderr)
    return code


def main() -> NoReturn:
    """The process from here on: sound streams first, and no traceback from the interpreter's own last flush."""
    prepare_streams()
    try:
        code = run()
    except OSError:  # stderr is gone or full, so that not even the error could be told
        code = 1
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    sys.exit(code)
