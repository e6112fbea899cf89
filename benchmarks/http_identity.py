"""Is a text over HTTP the one that `foredraft generate` writes, whatever else runs? Counts texts that differ.

    python -m benchmarks.http_identity gemma3-270m --raw -- -d ngram+model:gemma3-270m
    python -m benchmarks.http_identity qwen2.5-coder-1.5b --commands 4 -- -d ngram+model:qwen2.5-coder-0.5b

Different texts, greedy and with a seed, are asked one by one, then all at once of the same server, half of them
streamed, in a cache too small for all: preemptions are counted. `foredraft generate -d none` answers each in a process
of its own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import httpx
from benchmarks.soak import KEY, fold, serve
from benchmarks.soak_requests import CHAT, TEXT

from foredraft.bench.workloads import GROUPS, load_group

FLAGS = ["-c", "512", "--kv-cache-tokens", "512", "--max-num-seqs", "32", "--no-adaptive"]
WAYS = {"greedy": {"temperature": 0.0}, "seeded": {"temperature": 0.8, "seed": 7}}
PATIENCE_S = 900.0


def read_texts(num_texts: int, max_length: int) -> list[str]:
    """First turns, the kinds of task by turns. max_length: in characters."""
    groups = [load_group(name) for name in GROUPS]
    turns = (p.turns[0][:max_length].strip() for p in chain.from_iterable(zip(*groups, strict=False)))
    return list(islice(turns, num_texts))


@dataclass(frozen=True, slots=True)
class Task:
    """is_raw: texts are continued as they are; otherwise they are chats."""

    model: str
    num_tokens: int
    is_raw: bool


def ask(client: httpx.Client, task: Task, text: str, way: str, *, is_stream: bool) -> str:
    prompt: dict[str, Any] = {"prompt": text} if task.is_raw else {"messages": [{"role": "user", "content": text}]}
    body = {**prompt, **WAYS[way], "max_tokens": task.num_tokens, "stream": is_stream}
    response = client.post(TEXT if task.is_raw else CHAT, json=body)
    if response.status_code != 200:
        raise SystemExit(f"status {response.status_code}: {response.text}")
    lines = response.text.split("\n\n") if is_stream else [response.text]
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line not in ("", "data: [DONE]")]
    answer: str = fold(events)["0"]["text"]
    return answer


def generate(task: Task, text: str, way: str) -> str:
    """By `foredraft generate`, without speculation."""
    flags = [word for name, value in WAYS[way].items() for word in (f"--{name}", str(value))]
    flags += ["--raw"] if task.is_raw else []
    command = [sys.executable, "-m", "foredraft", "generate", "-m", task.model, "-d", "none", *flags]
    command += ["-n", str(task.num_tokens), "-p", text, "--json"]
    done = subprocess.run(command, check=True, capture_output=True)
    answer: str = json.loads(done.stdout)["text"]
    return answer


def num_preemptions(client: httpx.Client) -> int:
    lines = client.get("/metrics").text.splitlines()
    [value] = [line.split()[-1] for line in lines if line.startswith("foredraft:num_preemptions_total")]
    return round(float(value))


def compare(client: httpx.Client, task: Task, texts: Sequence[str], way: str, num_commands: int) -> int:
    """Prints a row of the table. Returns how many answers differ, and 1 if nothing was preempted."""
    alone = [ask(client, task, text, way, is_stream=False) for text in texts]
    before = num_preemptions(client)
    with ThreadPoolExecutor(len(texts)) as pool:

        def ask_beside(number: int) -> str:
            return ask(client, task, texts[number], way, is_stream=number % 2 == 0)

        together = list(pool.map(ask_beside, range(len(texts))))
    preemptions = num_preemptions(client) - before
    written = [generate(task, text, way) for text in texts[:num_commands]]
    num_different = sum(a != b for a, b in zip(alone, together, strict=True))
    num_otherwise = sum(a != b for a, b in zip(together, written, strict=False))
    cells = [way, len(texts), preemptions, num_different, len(written), num_otherwise]
    print("|", " | ".join(map(str, cells)), "|", flush=True)
    return num_different + num_otherwise + (preemptions == 0)


def main() -> int:
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--texts", type=int, default=32)
    parser.add_argument("--raw", action="store_true", help="continue the texts as they are: no chat template")
    parser.add_argument("--length", type=int, default=300, help="longest text, in characters")
    parser.add_argument("--tokens", type=int, default=64, help="longest answer")
    parser.add_argument("--commands", type=int, default=32, help="texts that `foredraft generate` answers as well")
    args = parser.parse_args(sys.argv[1:at])
    task, texts = Task(args.model, args.tokens, args.raw), read_texts(args.texts, args.length)
    with (
        tempfile.TemporaryDirectory() as directory,
        serve(args.model, [*FLAGS, *sys.argv[at + 1 :]], Path(directory) / "log") as (url, _),
        httpx.Client(base_url=url, headers={"authorization": f"Bearer {KEY}"}, timeout=PATIENCE_S) as client,
    ):
        print("| way | texts | preemptions | differ at once from one by one | commands | differ from them |")
        print("|---" * 6 + "|", flush=True)
        num_faults = sum(compare(client, task, texts, way, args.commands) for way in WAYS)
    return 1 if num_faults else 0


if __name__ == "__main__":
    sys.exit(main())
