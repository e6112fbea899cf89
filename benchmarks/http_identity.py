"""Is a text over HTTP the one that `foredraft generate` writes, whatever else runs? Counts texts that differ.

    python -m benchmarks.http_identity gemma3-270m -- -d ngram+model:gemma3-270m
    python -m benchmarks.http_identity qwen2.5-coder-1.5b --commands 4 -- -d ngram+model:qwen2.5-coder-0.5b

Different chats, greedy and with a seed, are asked one by one, then all at once of the same server, half of them
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
from itertools import chain, islice
from pathlib import Path

import httpx
from benchmarks.soak import KEY, fold, serve

from foredraft.bench.workloads import GROUPS, load_group

FLAGS = ["-c", "1024", "--kv-cache-tokens", "1024", "--max-num-seqs", "32", "--no-adaptive"]
WAYS = {"greedy": {"temperature": 0.0}, "seeded": {"temperature": 0.8, "seed": 7}}
PATIENCE_S = 900.0


def read_chats(num_chats: int, max_length: int) -> list[str]:
    """First turns, the kinds of task by turns. max_length: in characters."""
    groups = [load_group(name) for name in GROUPS]
    turns = (p.turns[0][:max_length].strip() for p in chain.from_iterable(zip(*groups, strict=False)))
    return list(islice(turns, num_chats))


def ask(client: httpx.Client, text: str, way: str, num_tokens: int, *, is_stream: bool) -> str:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": num_tokens, "stream": is_stream, **WAYS[way]}
    response = client.post("/v1/chat/completions", json=body)
    response.raise_for_status()
    lines = response.text.split("\n\n") if is_stream else [response.text]
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line not in ("", "data: [DONE]")]
    answer: str = fold(events)["0"]["text"]
    return answer


def generate(model: str, text: str, way: str, num_tokens: int) -> str:
    """By `foredraft generate`, without speculation."""
    flags = [word for name, value in WAYS[way].items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "foredraft", "generate", "-m", model, "-d", "none", "-n", str(num_tokens)]
    done = subprocess.run([*command, *flags, "-p", text, "--json"], check=True, capture_output=True)
    answer: str = json.loads(done.stdout)["text"]
    return answer


def num_preemptions(client: httpx.Client) -> int:
    lines = client.get("/metrics").text.splitlines()
    [value] = [line.split()[-1] for line in lines if line.startswith("foredraft:num_preemptions_total")]
    return round(float(value))


def compare(client: httpx.Client, chats: Sequence[str], way: str, args: argparse.Namespace) -> int:
    """Prints a row of the table. Returns how many texts differ."""
    alone = [ask(client, chat, way, args.tokens, is_stream=False) for chat in chats]
    before = num_preemptions(client)
    with ThreadPoolExecutor(len(chats)) as pool:

        def ask_beside(numbered: tuple[int, str]) -> str:
            return ask(client, numbered[1], way, args.tokens, is_stream=numbered[0] % 2 == 0)

        together = list(pool.map(ask_beside, enumerate(chats)))
    preemptions = num_preemptions(client) - before
    written = [generate(args.model, chat, way, args.tokens) for chat in chats[: args.commands]]
    num_different = sum(a != b for a, b in zip(alone, together, strict=True))
    num_otherwise = sum(a != b for a, b in zip(together, written, strict=False))
    cells = [way, len(chats), preemptions, num_different, len(written), num_otherwise]
    print("|", " | ".join(map(str, cells)), "|", flush=True)
    return num_different + num_otherwise + (preemptions == 0)


def main() -> int:
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--chats", type=int, default=32)
    parser.add_argument("--length", type=int, default=300, help="longest chat, in characters")
    parser.add_argument("--tokens", type=int, default=64, help="longest answer")
    parser.add_argument("--commands", type=int, default=32, help="chats that `foredraft generate` answers as well")
    args = parser.parse_args(sys.argv[1:at])
    chats = read_chats(args.chats, args.length)
    with (
        tempfile.TemporaryDirectory() as directory,
        serve(args.model, [*FLAGS, *sys.argv[at + 1 :]], Path(directory) / "log") as (url, _),
        httpx.Client(base_url=url, headers={"authorization": f"Bearer {KEY}"}, timeout=PATIENCE_S) as client,
    ):
        print("| texts | chats | preemptions | differ at once from one by one | commands | differ from them |")
        print("|---" * 6 + "|", flush=True)
        num_faults = sum(compare(client, chats, way, args) for way in WAYS)
    return 1 if num_faults else 0


if __name__ == "__main__":
    sys.exit(main())
