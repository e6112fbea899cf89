"""Throughput and latency of OpenAI-compatible servers under load: a mix of all kinds of task, so many clients at once.

Servers take turns at every level of concurrency. A client sends its next request when its last one is answered. Each
level begins its prompts differently, so that no server answers from a cache of an earlier level; `cache_salt` keeps two
ways of asking one server apart. Tokens are counted by the model's own tokenizer, the same for all servers.

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
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from statistics import geometric_mean, median, quantiles
from time import perf_counter
from typing import Any

from openai import AsyncOpenAI

from foredraft.bench.workloads import GROUPS, load_workload
from foredraft.models.gguf import read_gguf
from foredraft.models.hub import resolve
from foredraft.models.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Server:
    name: str
    client: AsyncOpenAI
    body: dict[str, Any]  # fields that go with every request


@dataclass(frozen=True, slots=True)
class Answer:
    """Seconds from the request to the first text and to the end."""

    first_s: float
    total_s: float
    num_tokens: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("servers", nargs="+", metavar="NAME=URL [JSON]", help="JSON: fields for every request")
    parser.add_argument("--concurrency", default="1,2,4,8,16")
    parser.add_argument("--limit", type=int, default=2, help="prompts of each kind")
    parser.add_argument("--tokens", type=int, default=128)
    args = parser.parse_args()
    asyncio.run(measure(args))


async def measure(args: argparse.Namespace) -> None:
    tokenizer = Tokenizer(read_gguf(resolve(args.model)).metadata)
    prompts = list(mixed(args.limit))
    servers = [parse_server(text) for text in args.servers]
    print("| clients | server | tokens/s | first token, s | 90 % | then tokens/s | answer, s | 90 % |")
    print("|---|---|---|---|---|---|---|---|")
    for concurrency in map(int, args.concurrency.split(",")):
        for server in servers:
            began = perf_counter()
            answers = await load(server, prompts, concurrency, args.tokens, tokenizer)
            print_level(concurrency, server, answers, perf_counter() - began)


def mixed(limit: int) -> Iterator[str]:
    """First turns, the kinds of task by turns."""
    by_group = [[p.turns[0] for p in load_workload(group, limit)] for group in GROUPS]
    for turns in zip_longest(*by_group):
        yield from (turn for turn in turns if turn is not None)


def parse_server(text: str) -> Server:
    name, _, rest = text.partition("=")
    url, _, body = rest.partition(" ")
    return Server(name, AsyncOpenAI(base_url=url, api_key="none", timeout=600), json.loads(body or "{}"))


async def load(
    server: Server, prompts: list[str], concurrency: int, num_tokens: int, tokenizer: Tokenizer
) -> list[Answer]:
    """All prompts, by `concurrency` clients."""
    model = (await server.client.models.list()).data[0].id
    waiting = iter(prompts)

    async def answer_in_turn() -> list[Answer]:
        return [await ask(server, model, prompt, str(concurrency), num_tokens, tokenizer) for prompt in waiting]

    clients = await asyncio.gather(*(answer_in_turn() for _ in range(concurrency)))
    return [answer for answers in clients for answer in answers]


async def ask(server: Server, model: str, prompt: str, level: str, num_tokens: int, tokenizer: Tokenizer) -> Answer:
    began, first_s, text = perf_counter(), 0.0, ""
    stream = await server.client.chat.completions.create(
        model=model,
        messages=[{"role": "system", "content": f"Room {level}. Be helpful."}, {"role": "user", "content": prompt}],
        temperature=0,
        max_tokens=num_tokens,
        stream=True,
        extra_body=server.body,
    )
    async for chunk in stream:
        if chunk.choices and (delta := chunk.choices[0].delta.content):
            first_s = first_s or perf_counter() - began
            text += delta
    return Answer(first_s, perf_counter() - began, len(tokenizer.encode(text)))


def print_level(concurrency: int, server: Server, answers: list[Answer], seconds: float) -> None:
    firsts, totals = [a.first_s for a in answers], [a.total_s for a in answers]
    then = geometric_mean((a.num_tokens - 1) / (a.total_s - a.first_s) for a in answers if a.num_tokens > 8)
    print(
        f"| {concurrency} | {server.name} | {sum(a.num_tokens for a in answers) / seconds:.1f} | "
        f"{median(firsts):.2f} | {quantiles(firsts, n=10)[-1]:.2f} | {then:.1f} | "
        f"{median(totals):.1f} | {quantiles(totals, n=10)[-1]:.1f} |",
        flush=True,
    )


if __name__ == "__main__":
    main()
