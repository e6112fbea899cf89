"""Everything at once, for half an hour: does the server stay right, up and small?

Clients, up to ten times as many as it has room for, send chats and completions of every kind, streamed and not; they
leave in mid-stream, are killed, read slowly, send what is no request, or have the wrong key. A fault is an answer to a
greedy or seeded request that differs in anything from the one got before, alone and without speculation; a status that
the documentation does not foresee; a block of the cache still in use at the end; memory that grows (Linux tells).

    python -m benchmarks.soak smollm2-135m --minutes 30
    python -m benchmarks.soak smollm2-135m --minutes 30 -- -d ngram+model:smollm2-135m -k 6      # flags of `serve`
    python -m benchmarks.soak http://127.0.0.1:8000 --pid 1234 --api-key KEY     # a server that runs already
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from statistics import linear_regression
from time import monotonic, sleep
from typing import Any

import httpx
from benchmarks.soak_requests import BAD_BODIES, FIELDS, TEXT, Case, make_cases, read_text

KEY = "soak"
#: A small cache, so that answers are preempted, and few seats.
FLAGS = ["-c", "512", "--kv-cache-tokens", "512", "--max-num-seqs", "8", "--max-num-waiting", "16"]
NUM_CLIENTS = 240  # ten times as many as have a seat or a place in the queue
NUM_CALM = 12
COUNTS = ["compared", "wrong", "slow", "refused", "left", "killed", "nonsense"]
PATIENCE_S = 300.0
#: Anonymous memory may grow by so much a minute in the last two thirds of a run of ten minutes or more.
MAX_GROWTH_KB = 256.0

Told = dict[str, Any]  # what all events of an answer say, by choice


@dataclass(frozen=True, slots=True)
class Outcome:
    status: int
    told: Told | None  # None unless the status is 200


@dataclass(frozen=True, slots=True)
class Sample:
    minute: float
    rss_kb: int
    anonymous_kb: int


def fold(events: Iterable[dict[str, Any]]) -> Told:
    """What the events of a stream add up to; an answer that is not streamed is one event."""
    told: Told = {}
    for choice in chain.from_iterable(event["choices"] for event in events):
        whole = told.setdefault(str(choice["index"]), {"text": "", "calls": {}, "logprobs": {}, "reason": None})
        piece = choice.get("delta") or choice.get("message") or choice
        whole["text"] += piece.get("content") or piece.get("text") or ""
        for position, call in enumerate(piece.get("tool_calls") or []):
            name, arguments = whole["calls"].get(call.get("index", position), ("", ""))
            function = call["function"]
            call_so_far = (name + (function.get("name") or ""), arguments + (function.get("arguments") or ""))
            whole["calls"][call.get("index", position)] = call_so_far
        for name, values in (choice.get("logprobs") or {}).items():
            whole["logprobs"].setdefault(name, []).extend(values or [])
        whole["reason"] = choice["finish_reason"] or whole["reason"]
    return told


@dataclass(slots=True)
class Soak:
    """One run. `expected` is complete before traffic begins; `counts` and `faults` only grow."""

    url: str
    client: httpx.AsyncClient
    slow_client: httpx.AsyncClient
    headers: dict[str, str]
    random: random.Random
    cases: list[Case] = field(default_factory=list)
    expected: dict[str, Outcome] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)

    async def prepare(self, only: str) -> None:
        """Ask each case alone, without speculation. only: cases whose names match."""
        card = (await self.client.get("/v1/models")).json()["data"][0]
        prompt = read_text(16 * card["max_model_len"])
        ids = (await self.client.post("/tokenize", json={"prompt": prompt})).json()["tokens"]
        self.cases = [case for case in make_cases(ids, card["max_model_len"]) if re.search(only, case.name)]
        for case in self.cases:
            plain = Case(case.name, case.path, {**case.body, "speculation": {"enabled": False}})
            self.expected[case.name] = outcome = await self.ask(plain, is_stream=False)
            if outcome.status not in (200, 400):
                raise SystemExit(f"alone, {case.name} got status {outcome.status}")

    async def ask(self, case: Case, *, is_stream: bool, pause_s: float = 0.0) -> Outcome:
        """pause_s: what a slow reader waits after each event."""
        body = {**case.body, "stream": is_stream}
        client = self.slow_client if pause_s else self.client
        async with client.stream("POST", case.path, json=body) as response:
            if response.status_code != 200:
                await self.check_refusal(response)
                return Outcome(response.status_code, None)
            if not is_stream:
                return Outcome(200, fold([json.loads(await response.aread())]))
            return Outcome(200, fold([event async for event in read_events(response, pause_s)]))

    async def check_refusal(self, response: httpx.Response) -> None:
        await response.aread()
        if response.status_code >= 500:
            self.fault(f"status {response.status_code}: {response.text[:200]}")
        elif response.status_code == 429:
            await asyncio.sleep(float(response.headers["retry-after"]) * self.random.uniform(1, 1.5))

    async def compare(self, pause_s: float = 0.0) -> None:
        case = self.random.choice(self.cases)
        is_stream = pause_s > 0 or self.random.random() < 0.5
        outcome = await self.ask(case, is_stream=is_stream, pause_s=pause_s)
        if outcome.status == 429:
            self.counts["refused"] += 1
            return
        self.counts["compared"] += 1
        self.counts["slow"] += pause_s > 0
        if outcome != self.expected[case.name]:
            self.counts["wrong"] += 1
            self.fault(f"{case.name}, stream={is_stream}: {outcome}, not {self.expected[case.name]}")

    async def read_slowly(self) -> None:
        await self.compare(pause_s=0.05)

    async def leave(self) -> None:
        """In mid-stream, or before an answer that is not streamed."""
        case = self.random.choice(self.cases)
        if self.random.random() < 0.5:
            try:
                await asyncio.wait_for(self.client.post(case.path, json=case.body), self.random.uniform(0, 1))
            except asyncio.TimeoutError:
                self.counts["left"] += 1
            return
        num_events = self.random.randint(1, 20)
        async with self.client.stream("POST", case.path, json={**case.body, "stream": True}) as response:
            if response.status_code >= 500:
                self.fault(f"status {response.status_code} to one who left")
            lines = response.aiter_lines()
            for _ in range(num_events):
                await anext(lines, None)
            self.counts["left"] += response.status_code == 200

    async def be_killed(self) -> None:
        """A client of its own, by SIGKILL, once it has got something."""
        body = json.dumps({"prompt": "Once upon a time", "stream": True, **FIELDS["long"]})
        options = [f"-H{name}: {value}" for name, value in self.headers.items()]
        command = ["curl", "-sN", self.url + TEXT, *options, "-Hcontent-type: application/json", "-d", body]
        process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
        assert process.stdout is not None
        await process.stdout.read(1)
        await asyncio.sleep(self.random.uniform(0, 0.3))
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)  # process.kill() may reap it before asyncio does
        self.counts["killed"] += await process.wait() == -signal.SIGKILL

    async def send_nonsense(self) -> None:
        path, content, status = self.random.choice(BAD_BODIES)
        response = await self.client.post(path, content=content, headers={"content-type": "application/json"})
        await self.expect(response, status, f"nonsense {content[:60]!r}")

    async def send_half(self) -> None:
        """A body that ends too early, or what is no HTTP at all."""
        url = httpx.URL(self.url)
        _, writer = await asyncio.open_connection(url.host, url.port or 80)
        head = "".join(f"{name}: {value}\r\n" for name, value in self.headers.items())
        half = f"POST {TEXT} HTTP/1.1\r\nhost: x\r\n{head}content-length: 1000\r\n\r\n{{".encode()
        writer.write(self.random.choice([half, b"\x16\x03\x01\x02\x00" * 20, b"GET\r\n\r\n"]))
        with suppress(ConnectionError):
            await writer.drain()
        await asyncio.sleep(self.random.uniform(0, 1))
        writer.close()
        self.counts["nonsense"] += 1

    async def use_wrong_key(self) -> None:
        """Of a server that asks for one."""
        if self.headers:
            case = self.random.choice(self.cases)
            response = await self.client.post(case.path, json=case.body, headers={"authorization": "Bearer wrong"})
            await self.expect(response, 401, "a wrong key")

    async def look(self) -> None:
        for path in ("/health", "/metrics", "/v1/models", "/version", "/"):
            await self.expect(await self.client.get(path), 200, path)
        tokens = await self.client.post("/tokenize", json={"prompt": "déjà vu 🙂"})
        if await self.expect(tokens, 200, "/tokenize"):
            text = await self.client.post("/detokenize", json={"tokens": tokens.json()["tokens"]})
            if await self.expect(text, 200, "/detokenize") and text.json()["prompt"] != "déjà vu 🙂":
                self.fault(f"detokenize: {text.text!r}")

    async def expect(self, response: httpx.Response, status: int, what: str) -> bool:
        """Whether it has this status."""
        if response.status_code == 429:
            await self.check_refusal(response)
        elif response.status_code != status:
            self.fault(f"{what}: status {response.status_code}, not {status}: {response.text[:200]}")
        self.counts["nonsense" if status >= 400 else "looked"] += 1
        return response.status_code == status

    def fault(self, what: str) -> None:
        self.faults.append(what)
        print(f"fault: {what[:600]}", file=sys.stderr, flush=True)

    async def live(self, number: int, num_calm: int, end: float, period_s: float) -> None:
        """One client. Those beyond the first `num_calm` come in the last third of each period."""
        acts: list[Callable[[], Awaitable[None]]] = [self.compare, self.read_slowly, self.leave, self.be_killed]
        acts += [self.send_nonsense, self.send_half, self.use_wrong_key, self.look]
        while (left_s := end - monotonic()) > 0:
            await asyncio.sleep(self.random.uniform(0, 0.5))
            if number >= num_calm and left_s % period_s > period_s / 3:
                continue
            [act] = self.random.choices(acts, [20, 2, 4, 3, 2, 1, 1, 1])
            try:
                await act()
            except httpx.HTTPError as error:
                self.fault(f"{act.__name__}: {error!r}")

    async def metrics(self) -> dict[str, float]:
        """By name, over all labels; 0 for what is not there."""
        text = (await self.client.get("/metrics")).text
        values: defaultdict[str, float] = defaultdict(float)
        for name, value in re.findall(r"^foredraft:(\w+)\{.*\} ([-+.\de]+)$", text, re.M):
            values[name] += float(value)
        return values

    async def watch(self, seconds: float, pid: int | None) -> None:
        """Memory every ten seconds, and a row of the table every minute."""
        heads = ["minute", *COUNTS, "preemptions", "RSS, MB", "anonymous, MB"]
        print("|", " | ".join(heads), "|\n" + "|---" * len(heads) + "|")
        began, interval_s = monotonic(), min(10.0, seconds / 6)
        for number in range(1, 1 + round(seconds / interval_s)):
            await asyncio.sleep(began + number * interval_s - monotonic())
            memory = read_memory(pid)
            self.samples.append(Sample((monotonic() - began) / 60, *memory))
            if number % 6 == 0:
                preemptions = (await self.metrics())["num_preemptions_total"]
                numbers = [self.samples[-1].minute, *(self.counts[name] for name in COUNTS), preemptions]
                cells = [*(f"{number:.0f}" for number in numbers), *(f"{kb / 1e3:.1f}" for kb in memory)]
                print("|", " | ".join(cells), "|", flush=True)

    async def end_idle(self) -> None:
        """Nothing runs, no block is owned, and all is as it was."""
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        deadline = monotonic() + PATIENCE_S
        while any(in_use := [(await self.metrics())[name] for name in names]):
            if monotonic() > deadline or (await self.client.get("/health")).status_code != 200:
                self.fault(f"not idle at the end: {in_use} are {names}")
                return
            await asyncio.sleep(0.1)
        for case in self.cases:
            if (outcome := await self.ask(case, is_stream=False)) != self.expected[case.name]:
                self.fault(f"afterwards, {case.name}: {outcome}, not {self.expected[case.name]}")
        await self.expect(await self.client.get("/health"), 200, "/health")

    def growth_kb(self) -> float:
        """Anonymous memory a minute, by least squares over the last two thirds."""
        settled = self.samples[len(self.samples) // 3 :]
        return linear_regression([s.minute for s in settled], [s.anonymous_kb for s in settled]).slope


async def read_events(response: httpx.Response, pause_s: float) -> AsyncIterator[dict[str, Any]]:
    """Raises HTTPError for a stream that ends otherwise than streams do."""
    last = ""
    async for line in response.aiter_lines():
        last = line or last
        if line and line != "data: [DONE]":
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise httpx.HTTPError(f"an error in a stream: {event}")
            yield event
            await asyncio.sleep(pause_s)
    if last != "data: [DONE]":
        raise httpx.HTTPError(f"a stream ended with {last!r}")


def read_memory(pid: int | None) -> tuple[int, int]:
    """(resident, anonymous) in kB, zeros where the system does not tell."""
    path = Path(f"/proc/{pid}/status")
    if pid is None or not path.exists():
        return 0, 0
    status = path.read_text()
    rss, anonymous = (int(re.findall(rf"^{name}:\s+(\d+) kB", status, re.M)[0]) for name in ("VmRSS", "RssAnon"))
    return rss, anonymous


@contextmanager
def serve(model: str, flags: Sequence[str], log: Path) -> Iterator[tuple[str, int]]:
    """`foredraft serve`: its address and process id. Raises SystemExit if it does not end as it should."""
    command = [sys.executable, "-m", "foredraft", "serve", model, "--port", "0", "--api-key", KEY, *flags]
    print(f"`foredraft serve {model} {' '.join(flags)}`\n", flush=True)
    with log.open("w") as written, subprocess.Popen(command, stderr=written, stdin=subprocess.DEVNULL) as process:
        try:
            while not (ready := re.search(r"ready: (http://\S+)/v1", log.read_text())):
                if process.poll() is not None:
                    raise SystemExit(log.read_text())
                sleep(0.1)
            yield ready[1], process.pid
        finally:
            process.send_signal(signal.SIGTERM)
    if process.returncode != 0:
        raise SystemExit(f"the server ended with code {process.returncode}: see {log}")


async def run(args: argparse.Namespace, url: str, pid: int | None, key: str | None) -> int:
    """Returns the number of faults."""
    headers = {"authorization": f"Bearer {key}"} if key else {}
    # A connection of its own for every request: one that is kept may be closed just as it is used. Slow readers have
    # small buffers.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    small = httpx.AsyncHTTPTransport(socket_options=[(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)], limits=limits)
    common: dict[str, Any] = {"base_url": url, "headers": headers, "timeout": PATIENCE_S}
    async with (
        httpx.AsyncClient(limits=limits, **common) as client,
        httpx.AsyncClient(transport=small, **common) as slow,
    ):
        soak = Soak(url, client, slow, headers, random.Random(args.seed))
        await soak.prepare(args.only)
        answered = sum(outcome.status == 200 for outcome in soak.expected.values())
        print(
            f"{len(soak.cases)} requests asked one by one, {answered} answered, the others refused as bad", flush=True
        )
        seconds = 60 * args.minutes
        end, period_s = monotonic() + seconds, min(60.0, seconds / 2)
        lives = [soak.live(number, NUM_CALM, end, period_s) for number in range(args.clients)]
        await asyncio.gather(soak.watch(seconds, pid), *lives)
        before = await soak.metrics()
        await soak.end_idle()
    print_end(soak, before, is_long=args.minutes >= 10)
    return len(soak.faults)


def print_end(soak: Soak, metrics: dict[str, float], *, is_long: bool) -> None:
    print(f"\ncounts: {dict(soak.counts)}")
    names = ["generation_tokens_total", "num_preemptions_total", "prefix_cache_hits_total"]
    names += ["spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total"]
    print(f"server: { {name: round(metrics[name]) for name in names} }")
    if soak.samples[-1].rss_kb:
        growth = soak.growth_kb()
        print(f"anonymous memory grew by {growth:.0f} kB a minute in the last two thirds")
        if is_long and growth > MAX_GROWTH_KB:
            soak.fault(f"memory grew by {growth:.0f} kB a minute")
    print(f"{len(soak.faults)} faults")


def main() -> int:
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    own, flags = sys.argv[1:at], sys.argv[at + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="a model to serve, or the http:// address of a server")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=NUM_CLIENTS)
    parser.add_argument("--only", metavar="REGEX", default="", help="only requests whose names match")
    parser.add_argument("--seed", type=int, default=0, help="of the traffic")
    parser.add_argument("--log", type=Path, help="file for the server's log")
    parser.add_argument("--api-key", help="of a server that runs already")
    parser.add_argument("--pid", type=int, help="its process, to watch its memory")
    args = parser.parse_args(own)
    if args.target.startswith("http://"):
        return 1 if asyncio.run(run(args, args.target.rstrip("/"), args.pid, args.api_key)) else 0
    with tempfile.TemporaryDirectory() as directory:
        log = args.log or Path(directory) / "log"
        with serve(args.target, [*FLAGS, *flags], log) as (url, pid):
            num_faults = asyncio.run(run(args, url, pid, KEY))
        if "Traceback" in log.read_text():
            num_faults += 1
            print("fault: a traceback in the server's log", file=sys.stderr)
    return 1 if num_faults else 0


if __name__ == "__main__":
    sys.exit(main())
