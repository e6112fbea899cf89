"""What `soak.py` sends: requests with one right answer, with every field of the APIs, and bodies that are refused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, cycle, islice
from typing import Any

from foredraft.bench.workloads import GROUPS, load_group

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 80}
SEEDED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.95, "seed": 7, "max_tokens": 80}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "sizes": {"type": "array", "items": {"type": "integer"}},
    },
    "required": ["name", "sizes"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "paint", "description": "Paint a thing", "parameters": SCHEMA}}

#: What both APIs take.
FIELDS: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "seeded": SEEDED,
    "one token": {**GREEDY, "max_tokens": 1},
    "eight choices": {**SEEDED, "n": 8, "max_tokens": 24},
    "stop strings": {**GREEDY, "stop": ["e t", ".\n", "ing"]},
    "penalties": {**SEEDED, "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
    "bias and filters": {**SEEDED, "logit_bias": {"32": 4.0, "65": -100.0}, "min_p": 0.02, "top_k": 50},
    "least length": {**GREEDY, "min_tokens": 32},
    "long": {**GREEDY, "ignore_eos": True, "max_tokens": 160},
    "long, seeded": {**SEEDED, "ignore_eos": True, "max_tokens": 160},
    "two drafts": {**GREEDY, "speculation": {"num_speculative_tokens": 2}},
    "salt": {**GREEDY, "cache_salt": "of my own"},
    "schema": {**SEEDED, "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}},
    "regex": {**GREEDY, "structured_outputs": {"regex": "(yes|no), because [a-z ]{10,40}\\."}},
    "prediction": {**GREEDY, "prediction": {"type": "content", "content": "The answer is: one, two, three, four."}},
}

#: Bodies that are refused, and how. (The last has too little room left for a token; a full queue may come first.)
BAD_BODIES: list[tuple[str, bytes, int]] = [
    (TEXT, b'{"prompt": "a", "max_tok', 400),
    (TEXT, b"\xff\xfe\x00", 400),
    (TEXT, b'{"prompt": 5}', 400),
    (TEXT, b'{"prompt": []}', 400),
    (TEXT, b'{"prompt": "a", "n": -1}', 400),
    (TEXT, b'{"prompt": "a", "temperature": "hot"}', 400),
    (TEXT, b'{"prompt": "a", "stop": [""]}', 400),
    (TEXT, b'{"prompt": [1, 2, 99999999]}', 400),
    (TEXT, b'{"prompt": "a", "model": "another"}', 404),
    (CHAT, b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', 400),
    (CHAT, b'{"messages": ' + b"[" * 5000 + b"]" * 5000 + b"}", 400),
    (CHAT, b'{"messages": [{"role": "user", "content": "a"}], "structured_outputs": {"regex": "("}}', 400),
    ("/v1/nothing", b"{}", 404),
    (TEXT, b'{"prompt": "' + b"word " * 50_000 + b'"}', 400),
]


@dataclass(frozen=True, slots=True)
class Case:
    """A request with one right answer."""

    name: str
    path: str
    body: dict[str, Any]


def read_text(num_characters: int) -> str:
    """Of the workloads, one after the other."""
    return " ".join(p.turns[0] for group in GROUPS for p in load_group(group))[:num_characters]


def make_cases(ids: Sequence[int], max_model_len: int) -> Iterator[Case]:
    """ids: a long text. Every set of fields with two texts in both APIs, and what only one of them takes."""
    groups = [load_group(name) for name in GROUPS]
    texts = cycle(p.turns[0][: max_model_len // 4] for p in chain.from_iterable(zip(*groups, strict=False)))
    system = {"role": "system", "content": "You are helpful, brief and never rude. Answer in English. 🙂 " * 2}

    def chat(name: str, fields: dict[str, Any], *before: dict[str, str]) -> Case:
        return Case(f"chat: {name}", CHAT, {"messages": [*before, {"role": "user", "content": next(texts)}], **fields})

    def text(name: str, prompt: Any, fields: dict[str, Any]) -> Case:
        return Case(f"text: {name}", TEXT, {"prompt": prompt, **fields})

    for name, fields in FIELDS.items():
        yield from (chat(name, fields), chat(f"{name}, again", fields, system))
        yield from (text(name, next(texts), fields), text(f"{name}, again", next(texts), fields))
    for name, choice in ("may call", "auto"), ("must call", "required"):
        yield chat(name, {**GREEDY, "tools": [TOOL], "tool_choice": choice})
    yield chat("logprobs", {**GREEDY, "logprobs": True, "top_logprobs": 5})
    yield chat("logprobs, seeded", {**SEEDED, "logprobs": True, "top_logprobs": 2}, system)
    yield text("logprobs", next(texts), {**GREEDY, "logprobs": 3})
    yield text("echo", next(texts), {**GREEDY, "echo": True})
    yield text("several prompts", list(islice(texts, 4)), {**SEEDED, "n": 2, "max_tokens": 16})
    yield text("emoji", "😀😃😄😁 " * 8, SEEDED)
    yield text("ids", ids[: max_model_len // 3], SEEDED)
    yield text("the whole context", ids[: max_model_len - 1], {**GREEDY, "max_tokens": 1})
    yield text("to the end of the context", ids[: max_model_len - 100], {**GREEDY, "max_tokens": None})
    yield text("more than the context", ids[:max_model_len], GREEDY)
