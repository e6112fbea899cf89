"""Throughput and latency of OpenAI-compatible servers under load: a mix of all kinds of task, so many clients at once.

Servers take turns at every level of concurrency, and all of it is repeated. A client sends its next request when its
last one is answered. Each level of each run begins its prompts differently, so that no server answers from the cache of
an earlier one; `cache_salt` keeps two ways of asking one server apart. Tokens are counted by the model's own tokenizer,
the same for all servers.

    foredraft serve qwen2.5-coder-1.5b -d ngram+model:qwen2.5-coder-0.5b --max-num-seqs 16 &
    llama-server -m FILE.gguf -c 40960 -np 16 -t 2 -fa on --port 8080 &
    python benchmarks/serving.py qwen2.5-coder-1.5b \\
        'plain=http://127.0.0.1:8000/v1 {"speculation": {"enabled": false}, "cache_salt": "plain"}' \\
        'speculative=http://127.0.0.1:8000/v1' 'llama.cpp=http://127.0.0.1:8080/v1'
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import zip_longest
from statistics import geometric_mean, median, quantiles
from sys import stderr
from time import perf_counter
from typing import Any

import httpx

from foredraft.bench.workloads import GROUPS, load_workload
from foredraft.models.gguf import read_gguf
from foredraft.models.hub import resolve
from foredraft.models.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Server:
    name: str
    client: httpx.AsyncClient  # a bare one: it shares the processors with the servers
    body: dict[str, Any]  # fields that go with every request


@dataclass(frozen=True, slots=True)
class Answer:
    """Seconds from the request to the first text and to the end."""

    first_s: float
    total_s: float
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Level:
    """One server under so many clients, in one run."""

    tokens_per_s: float  # of all answers together, prompts included
    first_s: float  # median
    first_s_90: float  # nine of ten are faster
    then_tokens_per_s: float  # of an answer after its first text, geometric mean
    total_s: float
    total_s_90: float

    @classmethod
    def of(cls, answers: Sequence[Answer], seconds: float) -> Level:
        firsts, totals = [a.first_s for a in answers], [a.total_s for a in answers]
        return cls(
            sum(a.num_tokens for a in answers) / seconds,
            median(firsts),
            quantiles(firsts, n=10)[-1],
            geometric_mean((a.num_tokens - 1) / (a.total_s - a.first_s) for a in answers if a.num_tokens > 8),
            median(totals),
            quantiles(totals, n=10)[-1],
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("servers", nargs="+", metavar="NAME=URL [JSON]", help="JSON: fields for every request")
    parser.add_argument("--concurrency", default="1,2,4,8,16")
    parser.add_argument("--limit", type=int, default=2, help="prompts of each kind")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    asyncio.run(measure(args))


async def measure(args: argparse.Namespace) -> None:
    tokenizer = Tokenizer(read_gguf(resolve(args.model)).metadata)
    prompts = list(mixed(args.limit))
    servers = [parse_server(text) for text in args.servers]
    levels = [int(level) for level in args.concurrency.split(",")]
    found: dict[tuple[int, str], list[Level]] = defaultdict(list)
    for run in range(args.runs):
        for concurrency in levels:
            for server in servers[run % 2 :] + servers[: run % 2]:
                began = perf_counter()
                room = f"{concurrency}-{run}"
                answers = await load(server, prompts, concurrency, args.tokens, tokenizer, room)
                found[concurrency, server.name].append(Level.of(answers, perf_counter() - began))
                print(
                    f"run {run}:", row(concurrency, server.name, found[concurrency, server.name][-1:], 0.0), file=stderr
                )
    print("| clients | server | tokens/s | | x first | first token, s | 90 % | then tokens/s | answer, s | 90 % |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for concurrency in levels:
        base = median(level.tokens_per_s for level in found[concurrency, servers[0].name])
        for server in servers:
            print(row(concurrency, server.name, found[concurrency, server.name], base))


def mixed(limit: int) -> Iterator[str]:
    """First turns, the kinds of task by turns."""
    by_group = [[p.turns[0] for p in load_workload(group, limit)] for group in GROUPS]
    for turns in zip_longest(*by_group):
        yield from (turn for turn in turns if turn is not None)


def parse_server(text: str) -> Server:
    name, _, rest = text.partition("=")
    url, _, body = rest.partition(" ")
    return Server(name, httpx.AsyncClient(base_url=url, timeout=600), json.loads(body or "{}"))


async def load(
    server: Server, prompts: list[str], concurrency: int, num_tokens: int, tokenizer: Tokenizer, room: str
) -> list[Answer]:
    """All prompts, by `concurrency` clients."""
    model = (await server.client.get("models")).raise_for_status().json()["data"][0]["id"]
    waiting = iter(prompts)

    async def answer_in_turn() -> list[Answer]:
        return [await ask(server, model, prompt, room, num_tokens, tokenizer) for prompt in waiting]

    clients = await asyncio.gather(*(answer_in_turn() for _ in range(concurrency)))
    return [answer for answers in clients for answer in answers]


async def ask(server: Server, model: str, prompt: str, room: str, num_tokens: int, tokenizer: Tokenizer) -> Answer:
    body = {
        "model": model,
        "messages": [{"role": "system", "content": f"Room {room}. Be helpful."}, {"role": "user", "content": prompt}],
        "temperature": 0,
        "max_tokens": num_tokens,
        "stream": True,
        **server.body,
    }
    began, first_s, text = perf_counter(), 0.0, ""
    async with server.client.stream("POST", "chat/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            choices = json.loads(line.removeprefix("data: "))["choices"]
            if choices and (delta := choices[0]["delta"].get("content")):
                first_s = first_s or perf_counter() - began
                text += delta
    return Answer(first_s, perf_counter() - began, len(tokenizer.encode(text)))


def row(concurrency: int, name: str, runs: Sequence[Level], base: float) -> str:
    """Medians of the runs, and the range of the first figure; base: the first server's."""
    rates = [level.tokens_per_s for level in runs]
    middle = [median(getattr(level, f.name) for level in runs) for f in fields(Level)]
    cells = [concurrency, name, f"{middle[0]:.1f}", f"{min(rates):.1f} to {max(rates):.1f}"]
    cells += [f"{middle[0] / base:.2f}" if base else "", f"{middle[1]:.2f}", f"{middle[2]:.2f}"]
    cells += [f"{value:.1f}" for value in middle[3:]]
    return "| " + " | ".join(map(str, cells)) + " |"


if __name__ == "__main__":
    main()
