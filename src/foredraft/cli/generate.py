"""`foredraft generate`: one prompt, one answer."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import click

from foredraft.cli.console import STANDARD_STREAM, Session, hold_log, note, read_text, write_answer, write_json
from foredraft.cli.images import blaming_files, image_option, user_message
from foredraft.cli.options import EngineOptions, debug_option, engine_options, json_option, open_llm, sampling_options
from foredraft.cli.words import TokenBytes, summarise
from foredraft.errors import ForedraftError
from foredraft.types import Chunk, Completion, SamplingParams, TokenLogprob

if TYPE_CHECKING:
    from foredraft.engine.llm import LLM


@click.command("generate")
@engine_options
@click.option("-p", "--prompt", metavar="TEXT", help="What to answer.")
@click.option(
    "-f", "--file", metavar="FILE", help="The same, from a file (- is standard input) without its last newline."
)
@image_option
@click.option("--raw", is_flag=True, help="Continue the text as it is: no chat template.")
@click.option("--prediction", metavar="FILE", help="Text that the answer will resemble; drafts are taken from it.")
@sampling_options
@click.option(
    "--logprobs", type=click.IntRange(0, 20), metavar="N", help="With --json: log-probabilities and N alternatives."
)
@json_option
@click.option(
    "--trace-rounds", is_flag=True, help="Show each round: proposed, accepted, corrected, times; the answer after them."
)
@debug_option
@click.pass_obj
def command(
    session: Session,
    options: EngineOptions,
    params: SamplingParams,
    prompt: str | None,
    file: str | None,
    images: Sequence[str],
    raw: bool,
    prediction: str | None,
    logprobs: int | None,
    json_target: str | None,
    trace_rounds: bool,
) -> None:
    """Answer one prompt. The answer goes to stdout, everything else to stderr."""
    if logprobs is not None and json_target is None:
        raise click.UsageError("--logprobs are written by --json; give both")
    if raw and images:
        raise click.UsageError("--image goes through the chat template: leave --raw out")
    text = _prompt(prompt, file)
    params = replace(params, logprobs=logprobs)
    if prediction is not None:
        params = replace(params, prediction=_read_prediction(prediction))
    llm = open_llm(options, session)
    if llm.tokenizer.chat_template is None and not raw:
        note(f"{options.model} has no chat template: it continues the text as it is, as with --raw")
    logging.getLogger("foredraft").setLevel(logging.INFO)  # says when a drafter does not pay, and why
    chunks = _stream(llm, text, images, params, raw=raw, trace_rounds=trace_rounds)
    with hold_log():
        completion = _print_answer(chunks, quiet=json_target == STANDARD_STREAM, at_once=trace_rounds)
    if json_target is not None:
        write_json(as_json(completion, options, params, llm.tokenizer), json_target)
    note(summarise(completion))


def as_json(
    completion: Completion, options: EngineOptions, params: SamplingParams, tokenizer: TokenBytes
) -> dict[str, Any]:
    """The object that `--json` writes: the answer, and what was asked of whom."""
    value = asdict(completion)
    del value["index"], value["logprobs"]
    del value["usage"]["num_cached_tokens"]  # a process's first prompt finds nothing in the cache
    if completion.logprobs is not None:
        value["logprobs"] = [_logprob_as_json(entry, tokenizer) for entry in completion.logprobs]
    return value | {"model": options.model, "drafter": options.drafter, "parameters": asdict(params)}


def _logprob_as_json(entry: TokenLogprob, tokenizer: TokenBytes) -> dict[str, Any]:
    def named(token_id: int, logprob: float) -> dict[str, Any]:
        text = tokenizer.token_bytes(token_id).decode("utf-8", "replace")
        return {"token_id": token_id, "token": text, "logprob": logprob}

    return named(entry.token_id, entry.logprob) | {"top": [named(*alternative) for alternative in entry.top]}


def _prompt(prompt: str | None, file: str | None) -> str:
    if (prompt is None) == (file is None):
        raise click.UsageError("give the prompt with either -p TEXT or -f FILE (-f - reads standard input)")
    text = prompt if prompt is not None else read_text(file or STANDARD_STREAM).removesuffix("\n")
    if not text.strip():
        raise click.UsageError("the prompt is empty")
    return text


def _read_prediction(file: str) -> str:
    if file != STANDARD_STREAM and not os.path.exists(file):
        name = file if len(file) <= 80 else f"{file[:80]}..."
        raise click.UsageError(f"--prediction takes a file with the text, and there is none called {name!r}")
    return read_text(file)


def _stream(
    llm: LLM, text: str, images: Sequence[str], params: SamplingParams, *, raw: bool, trace_rounds: bool
) -> Iterator[Chunk]:
    if trace_rounds:
        from foredraft.cli.rounds import RoundPrinter

        llm.on_round(RoundPrinter(llm.tokenizer))
    if raw or (llm.tokenizer.chat_template is None and not images):
        return llm.stream(text, params)
    messages = [user_message(text, images)]
    with blaming_files(messages):
        return llm.stream_chat(messages, params)


def _print_answer(chunks: Iterator[Chunk], *, quiet: bool, at_once: bool) -> Completion:
    """Writes the answer to stdout, as it comes or at once when it is complete, and ends its last line."""
    completion = None
    for chunk in chunks:
        completion = chunk.completion or completion
        if not quiet and not at_once:
            write_answer(chunk.text)
    if completion is None:
        raise ForedraftError("the engine ended without an answer")
    if not quiet:
        rest = completion.text if at_once else ""
        write_answer(rest + ("" if completion.text.endswith("\n") else "\n"))
    return completion
