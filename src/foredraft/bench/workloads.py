"""Prompts to measure with: eight groups that ship with the package, or any JSON Lines file of the same form."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from foredraft.errors import ParameterError

#: The kinds of work, as people meet them.
GROUPS = ("chat", "coding", "editing", "summarising", "maths", "questions", "retrieval", "translation")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One conversation: the user's turns. Every turn is answered before the next one is asked."""

    id: str
    category: str
    turns: tuple[str, ...]


def load_workload(name: str, limit: int | None = None) -> list[Prompt]:
    """Prompts of a group, of `all` groups, or of a file; at most `limit` of each category, in the file's order.

    Raises ParameterError for an unknown name and for a file that is not JSON Lines with `turns`.
    """
    if name in GROUPS:
        prompts = load_group(name)
    elif name == "all":
        prompts = [prompt for group in GROUPS for prompt in load_group(group)]
    elif Path(name).is_file():
        prompts = read_prompts(Path(name).read_bytes(), Path(name).stem, name)
    else:
        known = ", ".join((*GROUPS, "all"))
        raise ParameterError("--workload", f"{name!r} is neither a file nor one of {known}")
    return prompts if limit is None else first_of_each(prompts, limit)


def load_group(group: str) -> list[Prompt]:
    file = files("foredraft.bench") / "workloads" / f"{group}.jsonl"
    return read_prompts(file.read_bytes(), group, file.name)


def read_prompts(data: bytes, category: str, source: str) -> list[Prompt]:
    """JSON Lines with `turns`, and `question_id` and `category` if known: the form of Spec-Bench (arXiv 2401.07851)."""
    prompts = []
    for number, line in enumerate(data.splitlines(), start=1):
        if line.strip():
            prompts.append(_read_line(line, number, category, source))
    if not prompts:
        raise ParameterError("--workload", f"{source} has no prompts")
    return prompts


def first_of_each(prompts: Sequence[Prompt], limit: int) -> list[Prompt]:
    counts: dict[str, int] = {}
    kept = []
    for prompt in prompts:
        counts[prompt.category] = counts.get(prompt.category, 0) + 1
        if counts[prompt.category] <= limit:
            kept.append(prompt)
    return kept


def _read_line(line: bytes, number: int, category: str, source: str) -> Prompt:
    try:
        record = json.loads(line)
        turns = record["turns"]
        sound = isinstance(turns, list) and bool(turns) and all(isinstance(turn, str) and turn for turn in turns)
    except (ValueError, KeyError, TypeError):
        sound = False
    if not sound:
        raise ParameterError("--workload", f"{source}, line {number}: needs an object with turns, a list of texts")
    return Prompt(str(record.get("question_id", number)), str(record.get("category", category)), tuple(turns))
