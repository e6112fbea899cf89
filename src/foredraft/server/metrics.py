"""What a Prometheus server scrapes, under vLLM's names with the prefix `foredraft:` (`docs/metrics.md` lists them).

Drafts are counted as rounds end, in the engine's thread; tokens and latencies as chunks arrive, in the event loop's.
The engine's load is read when scraped. All times come from the caller.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from foredraft.engine.generator import Generator
from foredraft.engine.stats import EngineSnapshot, Round
from foredraft.server.alarm import AcceptanceAlarm, Answer
from foredraft.types import Chunk, Completion

logger = logging.getLogger("foredraft")

PREFIX = "foredraft:"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

#: Values of `finished_reason`.
REASONS = ("stop", "length", "abort", "error")

#: The rolling acceptance looks at so many drafts.
ROLLING_DRAFTS = 256

#: Upper bounds of the histograms' buckets, in seconds.
FIRST_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
BETWEEN_TOKENS_BUCKETS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.015,
    0.02,
    0.03,
    0.04,
    0.05,
    0.075,
    0.1,
    0.15,
    0.25,
    0.5,
    1,
    2.5,
)
REQUEST_BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 30, 60, 120, 300, 600)


@dataclass(frozen=True, slots=True)
class RequestTraits:
    """What a request is like, as far as it may explain its acceptance."""

    num_prompt_tokens: int
    is_chat: bool
    temperature: float


class ServerMetrics:
    """All metrics of one server, in a registry of its own. `snapshot` gives the engine's load when scraped."""

    def __init__(self, model_name: str, snapshot: Callable[[], EngineSnapshot]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_EngineCollector(model_name, snapshot))
        self._speculation = _SpeculationMetrics(self._registry, model_name)
        self._requests = _RequestTotals(self._registry, model_name)

    def attach(self, generator: Generator) -> None:
        """Count what this engine drafts."""
        for drafter in generator.engine.drafters:
            self._speculation.start(drafter.name, drafter.needs.least_acceptance)
        generator.on_round(self.observe_round)

    def observe_round(self, round: Round) -> None:
        """One sequence's share of one pass."""
        if round.proposed:
            self._speculation.count_draft(round.source, len(round.proposed), len(round.accepted))

    def begin(self, traits: RequestTraits, num_choices: int, now: float) -> RequestMetrics:
        """A request has arrived. `now`: seconds of any monotonic clock, the same for all calls."""
        return RequestMetrics(self._requests, self._speculation, traits, num_choices, now)

    def render(self) -> bytes:
        """Prometheus' text format (CONTENT_TYPE)."""
        return generate_latest(self._registry)


class RequestMetrics:
    """One request and its choices. Call `end` whatever happens: what has not finished by then was aborted."""

    def __init__(
        self,
        totals: _RequestTotals,
        speculation: _SpeculationMetrics,
        traits: RequestTraits,
        num_choices: int,
        now: float,
    ) -> None:
        self._totals = totals
        self._speculation = speculation
        self._traits = traits
        self._num_unfinished = num_choices
        self._began = now
        self._last_token: dict[int, float] = {}  # choice -> time of its newest token

    def observe(self, chunk: Chunk, now: float) -> None:
        """A chunk of any choice has come."""
        if chunk.token_ids:
            self._count_tokens(chunk.index, len(chunk.token_ids), now)
        if chunk.finish_reason is not None:
            self._num_unfinished -= 1
            self._totals.finished["error" if chunk.error is not None else chunk.finish_reason].inc()
            self._totals.whole_request.observe(now - self._began)
        if chunk.completion is not None:
            self._speculation.judge(chunk.completion, self._traits)

    def end(self) -> None:
        """No more chunks will come."""
        self._totals.finished["abort"].inc(self._num_unfinished)
        self._num_unfinished = 0

    def _count_tokens(self, choice: int, num_tokens: int, now: float) -> None:
        if not self._last_token:
            self._totals.prompt_tokens.inc(self._traits.num_prompt_tokens)
        self._totals.generation_tokens.inc(num_tokens)
        if choice in self._last_token:
            gap = (now - self._last_token[choice]) / num_tokens
            for _ in range(num_tokens):
                self._totals.between_tokens.observe(gap)
        else:
            self._totals.first_token.observe(now - self._began)
        self._last_token[choice] = now


class _RequestTotals:
    """Tokens, latencies and ends of all requests."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        def counter(name: str, words: str) -> Counter:
            return Counter(PREFIX + name, words, ["model_name"], registry=registry).labels(model_name)

        def histogram(name: str, words: str, buckets: tuple[float, ...]) -> Histogram:
            metric = Histogram(PREFIX + name, words, ["model_name"], buckets=buckets, registry=registry)
            return metric.labels(model_name)

        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of requests that got an answer.")
        self.generation_tokens = counter("generation_tokens", "Tokens generated.")
        self.first_token = histogram(
            "time_to_first_token_seconds", "From the request to its first token.", FIRST_TOKEN_BUCKETS
        )
        self.between_tokens = histogram(
            "inter_token_latency_seconds",
            "Between tokens of an answer; m tokens of one pass count as m gaps of an m-th of the time.",
            BETWEEN_TOKENS_BUCKETS,
        )
        self.whole_request = histogram(
            "e2e_request_latency_seconds", "From the request to its last token.", REQUEST_BUCKETS
        )
        finished = Counter(
            f"{PREFIX}request_success", "Answers ended.", ["model_name", "finished_reason"], registry=registry
        )
        self.finished = {reason: finished.labels(model_name, reason) for reason in REASONS}


class _SpeculationMetrics:
    """Drafts by drafter, and the alarms about them."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        def counter(name: str, words: str, *more: str) -> Counter:
            return Counter(PREFIX + name, words, ["model_name", "drafter", *more], registry=registry)

        def gauge(name: str, words: str, *more: str) -> Gauge:
            return Gauge(PREFIX + name, words, ["model_name", "drafter", *more], registry=registry)

        self._model = model_name
        self._alarm = AcceptanceAlarm()
        self._rolling: dict[str, RollingRate] = {}
        self._drafts = counter("spec_decode_num_drafts", "Drafts verified.")
        self._draft_tokens = counter("spec_decode_num_draft_tokens", "Draft tokens verified.")
        self._accepted_tokens = counter("spec_decode_num_accepted_tokens", "Draft tokens that became text.")
        self._accepted_at = counter(
            "spec_decode_num_accepted_tokens_per_pos", "Drafts whose token at this position became text.", "position"
        )
        self._rate = gauge(
            "spec_decode_acceptance_rate", f"Accepted share of the draft tokens of the last {ROLLING_DRAFTS} drafts."
        )
        self._alarm_on = gauge(
            "spec_decode_acceptance_alarm", "1 while acceptance is abnormally low (low) or has dropped (drop).", "kind"
        )
        self._alarms = counter("spec_decode_acceptance_alarms", "Alarms, by their likely cause.", "kind", "cause")

    def count_draft(self, drafter: str, num_proposed: int, num_accepted: int) -> None:
        if drafter not in self._rolling:
            self.start(drafter, floor=0.0)
        self._drafts.labels(self._model, drafter).inc()
        self._draft_tokens.labels(self._model, drafter).inc(num_proposed)
        self._accepted_tokens.labels(self._model, drafter).inc(num_accepted)
        for position in range(num_accepted):
            self._accepted_at.labels(self._model, drafter, position).inc()
        self._rate.labels(self._model, drafter).set(self._rolling[drafter].add(num_proposed, num_accepted))

    def start(self, drafter: str, floor: float) -> None:
        """Series that begin at 0: the first event is a rise, which `rate()` sees. floor: of `AcceptanceAlarm.watch`."""
        self._alarm.watch(drafter, floor)
        self._rolling[drafter] = RollingRate(ROLLING_DRAFTS)
        for metric in (self._drafts, self._draft_tokens, self._accepted_tokens):
            metric.labels(self._model, drafter)
        self._rate.labels(self._model, drafter).set(math.nan)  # no draft yet
        for kind in ("low", "drop"):
            self._alarm_on.labels(self._model, drafter, kind)

    def judge(self, completion: Completion, traits: RequestTraits) -> None:
        """Watch the acceptance of finished answers. An alarm is logged when it begins and when it ends."""
        for drafter, counts in completion.speculation.by_drafter.items():
            answer = Answer(
                num_drafts=counts["drafts"],
                num_draft_tokens=counts["draft_tokens"],
                num_accepted_tokens=counts["accepted_tokens"],
                is_chat=traits.is_chat,
                temperature=traits.temperature,
                num_prompt_tokens=traits.num_prompt_tokens,
            )
            for alarm in self._alarm.observe(drafter, answer):
                self._alarm_on.labels(self._model, drafter, alarm.kind).set(alarm.is_on)
                if alarm.is_on:
                    self._alarms.labels(self._model, drafter, alarm.kind, alarm.cause).inc()
                logger.log(logging.WARNING if alarm.is_on else logging.INFO, "%s: %s", drafter, alarm.message)


class RollingRate:
    """Accepted share of the draft tokens of the newest `num_drafts` drafts."""

    def __init__(self, num_drafts: int) -> None:
        self._drafts: deque[tuple[int, int]] = deque()  # (proposed, accepted), the newest last
        self._num_drafts = num_drafts
        self._num_proposed = 0
        self._num_accepted = 0

    def add(self, num_proposed: int, num_accepted: int) -> float:
        """The rate with this draft, which has at least one token."""
        self._count(num_proposed, num_accepted)
        self._drafts.append((num_proposed, num_accepted))
        if len(self._drafts) > self._num_drafts:
            oldest_proposed, oldest_accepted = self._drafts.popleft()
            self._count(-oldest_proposed, -oldest_accepted)
        return self._num_accepted / self._num_proposed

    def _count(self, num_proposed: int, num_accepted: int) -> None:
        self._num_proposed += num_proposed
        self._num_accepted += num_accepted


class _EngineCollector(Collector):
    """The engine's load: one snapshot a scrape, so that its figures belong together."""

    def __init__(self, model_name: str, snapshot: Callable[[], EngineSnapshot]) -> None:
        self._model = model_name
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        return engine_families(self._snapshot(), self._model)

    def describe(self) -> Iterator[Metric]:
        """Names without a snapshot: the engine may not be there yet."""
        return engine_families(EngineSnapshot(0, 0, 0, 0.0, 0, 0), self._model)


def engine_families(snapshot: EngineSnapshot, model_name: str) -> Iterator[Metric]:
    gauges = {
        "num_requests_running": ("Sequences that the engine works on.", snapshot.num_running),
        "num_requests_waiting": ("Sequences that wait for room.", snapshot.num_waiting),
        "kv_cache_usage_perc": ("Share of the cache's blocks in use, 0 to 1.", snapshot.kv_cache_usage),
    }
    counters = {
        "num_preemptions": ("Sequences put back because blocks ran out.", snapshot.num_preemptions),
        "prefix_cache_queries": ("Prompt tokens looked up in the prefix cache.", snapshot.prefix_cache_queries),
        "prefix_cache_hits": ("Prompt tokens found there.", snapshot.prefix_cache_hits),
    }
    for name, (words, value) in gauges.items():
        gauge = GaugeMetricFamily(PREFIX + name, words, labels=["model_name"])
        gauge.add_metric([model_name], value)
        yield gauge
    for name, (words, value) in counters.items():
        counter = CounterMetricFamily(PREFIX + name, words, labels=["model_name"])
        counter.add_metric([model_name], value)
        yield counter
