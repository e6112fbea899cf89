"""Runs made by hand, with times that can be divided in the head."""

from foredraft.bench.figures import Run, Sample
from foredraft.bench.machine import Spent
from foredraft.types import SpeculationStats


def spent(wall_s: float, cpu_s: float = 0.0, joules: float | None = None) -> Spent:
    return Spent(wall_s, cpu_s, joules)


def run(
    *,
    decode_s: float = 1.0,
    num_tokens: int = 11,
    first_id: int = 0,
    prefill_s: float = 1.0,
    cpu_s: float = 0.0,
    joules: float | None = None,
    speculation: SpeculationStats | None = None,
) -> Run:
    """Eleven tokens: one from the prompt's pass, ten decoded in `decode_s`."""
    ids = tuple(range(first_id, first_id + num_tokens))
    return Run(ids, "text", 100, spent(prefill_s), spent(decode_s, cpu_s, joules), speculation)


def sample(engine: str, run: Run, *, workload: str = "w", prompt: str = "p", repeat: int = 0) -> Sample:
    return Sample(workload, prompt, engine, repeat, run)


def speculation(num_drafts: int, num_draft_tokens: int, accepted: tuple[int, ...], num_passes: int) -> SpeculationStats:
    """`accepted`: per position."""
    return SpeculationStats(num_passes, num_drafts, num_draft_tokens, sum(accepted), 0.0, 0.0, 0.0, accepted, {})
