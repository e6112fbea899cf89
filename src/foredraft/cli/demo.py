"""`foredraft demo`: a small model answers plain and speculative, and the two answers are compared."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from foredraft.cli.console import Session, make_console
from foredraft.cli.options import EngineOptions, debug_option, open_llm
from foredraft.cli.words import TokenBytes, describe_acceptance, token_texts
from foredraft.types import TARGET, Completion, SamplingParams

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from foredraft.engine.llm import LLM

MODEL = "smollm2-135m"
#: An edit: the answer quotes the prompt, which is where n-grams pay.
PROMPT = (
    "Change this letter: the meeting is on Thursday, not on Tuesday. Return the whole letter.\n\n"
    "Dear Anna,\n\n"
    "thank you for your message. The meeting is on Tuesday at ten o'clock in the small room on the third floor. "
    "Please bring the report about the new garden, and the list of people who want to help. "
    "We will have coffee and cake after the meeting.\n\n"
    "Best wishes,\nTom"
)
PARAMS = SamplingParams(temperature=0, max_tokens=128)
NUM_RUNS = 2
NUM_DRAFTED = 8
#: With fewer tokens a pass drafts saved no passes, and a difference of speeds is the machine's.
LEAST_GAIN = 1.1

#: Colours of a token's source.
STYLES: Mapping[str, str] = {TARGET: "none", "ngram": "green", "model": "cyan"}


@click.command("demo")
@debug_option
@click.pass_obj
def command(session: Session) -> None:
    """Answer a prompt plain and speculative with smollm2-135m (98 MB, downloaded once), and compare."""
    options = EngineOptions(MODEL, num_speculative_tokens=NUM_DRAFTED, adaptive=False)  # drafts whatever they cost
    llm = open_llm(options, session)
    plain, speculative = run_interleaved(llm, PROMPT, PARAMS, NUM_RUNS)
    is_identical = plain[-1].token_ids == speculative[-1].token_ids
    console = make_console(sys.stdout)
    console.print(f"[bold]Prompt[/bold]\n{PROMPT}\n")
    console.print(side_by_side(llm.tokenizer, plain[-1], speculative[-1]))
    speeds = [statistics.median(run.timing.tokens_per_s for run in runs) for runs in (plain, speculative)]
    console.print(f"plain:       {speeds[0]:.1f} tokens/s")
    tokens_per_pass = speculative[-1].speculation.tokens_per_pass
    console.print(f"speculative: {speeds[1]:.1f} tokens/s, {describe_gain(speeds[1] / speeds[0], tokens_per_pass)}")
    console.print(f"acceptance:  {describe_acceptance(speculative[-1])}, {tokens_per_pass:.2f} tokens a pass")
    console.print(f"identical: {'yes' if is_identical else 'no'}")
    if not is_identical:
        click.get_current_context().exit(1)


def run_interleaved(
    llm: LLM, prompt: str, params: SamplingParams, num_runs: int
) -> tuple[list[Completion], list[Completion]]:
    """Answers, plain and speculative in turn, so that whatever else the machine does slows both."""
    chat = llm.render_chat([{"role": "user", "content": prompt}])
    without_drafts = replace(params, num_speculative_tokens=0)
    plain, speculative = [], []
    for _ in range(num_runs):
        plain += llm.generate(chat, without_drafts)
        speculative += llm.generate(chat, params)
    return plain, speculative


def describe_gain(factor: float, tokens_per_pass: float) -> str:
    """factor: of the two speeds."""
    return f"{factor:.2f} times plain" if tokens_per_pass >= LEAST_GAIN else "no draft paid: the difference is noise"


def side_by_side(tokenizer: TokenBytes, plain: Completion, speculative: Completion) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.ROUNDED, expand=True, show_lines=False)
    for name, completion in (("plain", plain), ("speculative", speculative)):
        sources = dict.fromkeys(completion.origins)
        legend = ", ".join(f"[{STYLES.get(s, 'magenta')}]{s}[/]" for s in sources if s != TARGET)
        table.add_column(f"{name} (drafted by {legend})" if legend else name, ratio=1)
    table.add_row(coloured(tokenizer, plain), coloured(tokenizer, speculative))
    return table


def coloured(tokenizer: TokenBytes, completion: Completion) -> Text:
    """The answer with each token in the colour of its source."""
    from rich.text import Text

    text = Text()
    remaining = len(completion.text)  # the end-of-text token is no text
    for piece, origin in zip(token_texts(tokenizer, completion.token_ids), completion.origins, strict=True):
        text.append(piece[:remaining], STYLES.get(origin, "magenta"))
        remaining -= len(piece[:remaining])
    return text
