from __future__ import annotations

import json
import logging
import math
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from foredraft.drafters.model import ModelDrafter
from foredraft.drafters.ngram import NgramDrafter
from foredraft.engine.generator import Generator
from foredraft.engine.stats import EngineSnapshot, Round
from foredraft.errors import NumericalError
from foredraft.server.metrics import RequestTraits, RollingRate, ServerMetrics
from foredraft.testing import ByteTokenizer, TinyModel
from foredraft.types import Chunk, Completion, SamplingParams, SpeculationStats, Timing, Usage
from tests.server.serving import PATIENCE, GatedGenerator, Server, connect, running_server

IDLE = EngineSnapshot(0, 0, 0, 0.0, 0, 0)
TRAITS = RequestTraits(num_prompt_tokens=7, is_chat=True, temperature=0.0)
MODEL = {"model_name": "tiny"}


def make_metrics(snapshot: Callable[[], EngineSnapshot] = lambda: IDLE) -> ServerMetrics:
    return ServerMetrics("tiny", snapshot)


def make_generator() -> Generator:
    """With an n-gram drafter, and a draft model from which 0.25 tokens per draft are the least to expect."""
    model = TinyModel(vocab_size=272, max_model_len=512, num_blocks=160, kinship=4.0)
    draft = TinyModel(vocab_size=272, max_model_len=512, num_blocks=160, kinship=4.0, seed=7)
    drafters = [NgramDrafter(), ModelDrafter("model:d", draft, 272)]
    return Generator(model, ByteTokenizer(), drafters, adaptive=False, native=False)


def value(metrics: ServerMetrics, name: str, **labels: object) -> float:
    """One sample as a scraper reads it. KeyError if it is not there, or there twice."""
    wanted = MODEL | {key: str(text) for key, text in labels.items()}
    families = text_string_to_metric_families(metrics.render().decode())
    found = [s.value for f in families for s in f.samples if s.name == f"foredraft:{name}" and s.labels == wanted]
    if len(found) != 1:
        raise KeyError(name, wanted, found)
    return found[0]


def total(metrics: ServerMetrics, name: str, **labels: object) -> float:
    """The sum of all samples with at least these labels."""
    wanted = {key: str(text) for key, text in labels.items()}.items()
    families = text_string_to_metric_families(metrics.render().decode())
    return sum(
        s.value for f in families for s in f.samples if s.name == f"foredraft:{name}" and wanted <= s.labels.items()
    )


def make_round(source: str, proposed: int, accepted: int) -> Round:
    return Round(
        sequence_id=0,
        num_prompt_rows=0,
        num_batch_rows=1 + proposed,
        proposed=tuple(range(proposed)),
        source=source,
        accepted=tuple(range(accepted)),
        rejected=tuple(range(accepted, proposed)),
        token=99,
        draft_s=0.0,
        pass_s=0.0,
        verify_s=0.0,
    )


def make_chunk(num_tokens: int, index: int = 0, **fields: Any) -> Chunk:
    return Chunk(0, index, "x", tuple(range(num_tokens)), ("target",) * num_tokens, **fields)


def make_completion(drafts: int, draft_tokens: int, accepted: int) -> Completion:
    counts = {"drafts": drafts, "draft_tokens": draft_tokens, "accepted_tokens": accepted}
    speculation = SpeculationStats(1, drafts, draft_tokens, accepted, 0.0, 1.0, 1.0, (), {"model:d": counts})
    return Completion(0, "x", (1,), "stop", Usage(7, 1), ("target",), speculation, Timing(0, 0, 0, 0))


def test_drafts_of_a_trace_by_hand() -> None:
    metrics = make_metrics()
    # the prompt's pass, drafts of 3 (3 accepted) and 3 (1), a pass without draft, 2 of another drafter (0)
    for source, proposed, accepted in [("", 0, 0), ("ngram", 3, 3), ("ngram", 3, 1), ("", 0, 0), ("model:d", 2, 0)]:
        metrics.observe_round(make_round(source, proposed, accepted))
    for drafter, drafts, tokens, accepted, rate in [("ngram", 2, 6, 4, 4 / 6), ("model:d", 1, 2, 0, 0.0)]:
        assert value(metrics, "spec_decode_num_drafts_total", drafter=drafter) == drafts
        assert value(metrics, "spec_decode_num_draft_tokens_total", drafter=drafter) == tokens
        assert value(metrics, "spec_decode_num_accepted_tokens_total", drafter=drafter) == accepted
        assert value(metrics, "spec_decode_acceptance_rate", drafter=drafter) == rate
    per_position = "spec_decode_num_accepted_tokens_per_pos_total"
    assert [value(metrics, per_position, drafter="ngram", position=i) for i in range(3)] == [2, 1, 1]
    with pytest.raises(KeyError):
        value(metrics, per_position, drafter="model:d", position=0)


def test_latencies_of_a_trace_by_hand() -> None:
    metrics = make_metrics()
    request = metrics.begin(TRAITS, 2, now=10.0)
    request.observe(make_chunk(1, index=0), now=10.5)
    request.observe(make_chunk(2, index=1), now=11.0)  # the first tokens of a choice have no gap before them
    request.observe(make_chunk(4, index=0), now=11.5)  # 4 gaps of 0.25 s
    request.observe(make_chunk(1, index=1, finish_reason="length"), now=12.0)  # 1 gap of 1 s
    request.observe(make_chunk(1, index=0, finish_reason="stop"), now=13.5)  # 1 gap of 2 s
    request.end()
    assert value(metrics, "prompt_tokens_total") == 7
    assert value(metrics, "generation_tokens_total") == 9
    assert value(metrics, "time_to_first_token_seconds_sum") == 0.5 + 1.0
    assert value(metrics, "time_to_first_token_seconds_count") == 2
    assert value(metrics, "inter_token_latency_seconds_sum") == 1.0 + 1.0 + 2.0
    assert value(metrics, "inter_token_latency_seconds_count") == 6
    assert value(metrics, "inter_token_latency_seconds_bucket", le=0.25) == 4
    assert value(metrics, "e2e_request_latency_seconds_sum") == 2.0 + 3.5
    assert value(metrics, "e2e_request_latency_seconds_count") == 2
    reasons = {r: value(metrics, "request_success_total", finished_reason=r) for r in ("stop", "length", "abort")}
    assert reasons == {"stop": 1, "length": 1, "abort": 0}


def test_what_a_client_leaves_behind_counts_as_aborted() -> None:
    metrics = make_metrics()
    request = metrics.begin(TRAITS, 3, now=0.0)
    request.observe(make_chunk(1, index=0, finish_reason="stop"), now=1.0)
    request.end()
    request.end()
    assert value(metrics, "request_success_total", finished_reason="stop") == 1
    assert value(metrics, "request_success_total", finished_reason="abort") == 2


def test_a_failed_answer_is_an_error_and_gives_no_tokens() -> None:
    metrics = make_metrics()
    request = metrics.begin(TRAITS, 1, now=0.0)
    request.observe(make_chunk(0, finish_reason="abort", error=NumericalError("NaN")), now=1.0)
    request.end()
    assert value(metrics, "request_success_total", finished_reason="error") == 1
    assert value(metrics, "request_success_total", finished_reason="abort") == 0
    assert value(metrics, "time_to_first_token_seconds_count") == 0
    assert value(metrics, "prompt_tokens_total") == 0


def test_the_load_is_read_when_scraped() -> None:
    snapshots = iter([EngineSnapshot(3, 2, 1, 0.25, 100, 64), EngineSnapshot(4, 0, 5, 0.5, 200, 65)])
    current = next(snapshots)
    metrics = make_metrics(snapshot=lambda: current)
    names = [
        "num_requests_running",
        "num_requests_waiting",
        "num_preemptions_total",
        "kv_cache_usage_perc",
        "prefix_cache_queries_total",
        "prefix_cache_hits_total",
    ]
    assert [value(metrics, name) for name in names] == [3, 2, 1, 0.25, 100, 64]
    current = next(snapshots)
    assert [value(metrics, name) for name in names] == [4, 0, 5, 0.5, 200, 65]


def test_known_drafters_have_series_from_the_beginning() -> None:
    metrics = make_metrics()
    metrics.attach(make_generator())
    assert value(metrics, "spec_decode_num_drafts_total", drafter="ngram") == 0
    assert value(metrics, "spec_decode_acceptance_alarm", drafter="ngram", kind="low") == 0
    assert math.isnan(value(metrics, "spec_decode_acceptance_rate", drafter="ngram"))


def test_every_server_counts_for_itself() -> None:
    one, other = make_metrics(), make_metrics()
    one.observe_round(make_round("ngram", 3, 1))
    assert "ngram" not in other.render().decode()


def test_the_rolling_rate_forgets() -> None:
    rate = RollingRate(2)
    assert rate.add(4, 4) == 1.0
    assert rate.add(4, 0) == 4 / 8
    assert rate.add(2, 1) == 1 / 6


def test_an_alarm_is_a_metric_and_one_line(caplog: pytest.LogCaptureFixture) -> None:
    metrics = make_metrics()
    metrics.attach(make_generator())
    with caplog.at_level(logging.INFO, logger="foredraft"):
        for _ in range(100):
            request = metrics.begin(TRAITS, 1, now=0.0)
            completion = make_completion(drafts=20, draft_tokens=60, accepted=2)
            request.observe(make_chunk(1, finish_reason="stop", completion=completion), now=1.0)
        lines = [record for record in caplog.records if record.levelno == logging.WARNING]
        assert len(lines) == 1
        assert (
            lines[0].getMessage().startswith("model:d: 0.10 tokens of a draft are right, abnormally few: every request")
        )
        assert value(metrics, "spec_decode_acceptance_alarm", drafter="model:d", kind="low") == 1
        alarms = {"drafter": "model:d", "kind": "low", "cause": "drafter"}
        assert value(metrics, "spec_decode_acceptance_alarms_total", **alarms) == 1
        for _ in range(100):
            completion = make_completion(drafts=20, draft_tokens=60, accepted=30)
            request.observe(make_chunk(1, finish_reason="stop", completion=completion), now=1.0)
        assert value(metrics, "spec_decode_acceptance_alarm", drafter="model:d", kind="low") == 0
        assert value(metrics, "spec_decode_acceptance_alarms_total", **alarms) == 1
        assert len(caplog.records) == 2


def test_the_counters_are_those_of_the_answers() -> None:
    """One run, two tools: what the completions say adds up to what is scraped."""
    metrics = make_metrics()
    llm = make_generator()
    metrics.attach(llm)
    prompts = ["abcabcabcabc", "to be or not to be", "x"]
    completions = []
    for prompt in prompts:
        request = metrics.begin(RequestTraits(len(prompt), False, 0.0), 2, now=0.0)
        for chunk in llm.stream(prompt, SamplingParams(temperature=0, max_tokens=60, n=2, ignore_eos=True)):
            request.observe(chunk, now=1.0)
            completions += [chunk.completion] if chunk.completion is not None else []
        request.end()
    said = [c.speculation for c in completions]
    for drafter in ("ngram", "model:d"):
        counts = [s.by_drafter[drafter] for s in said if drafter in s.by_drafter]
        for name in ("drafts", "draft_tokens", "accepted_tokens"):
            expected = sum(c[name] for c in counts)
            assert expected > 0
            assert value(metrics, f"spec_decode_num_{name}_total", drafter=drafter) == expected
    for i in range(max(len(s.accepted_per_position) for s in said)):
        expected = sum(s.accepted_per_position[i] for s in said if i < len(s.accepted_per_position))
        assert total(metrics, "spec_decode_num_accepted_tokens_per_pos_total", position=i) == expected
    assert value(metrics, "prompt_tokens_total") == sum(map(len, prompts))
    assert value(metrics, "generation_tokens_total") == sum(c.usage.completion_tokens for c in completions)
    ended = sum(value(metrics, "request_success_total", finished_reason=r) for r in ("stop", "length"))
    assert ended == len(completions) == 6


def scraped(server: Server, name: str, **labels: str) -> float:
    text = server.client.get("/metrics").text
    wanted = MODEL | labels
    families = text_string_to_metric_families(text)
    (found,) = [s.value for f in families for s in f.samples if s.name == f"foredraft:{name}" and s.labels == wanted]
    return found


def test_a_server_counts_what_it_answers() -> None:
    with running_server() as server:
        answers = [server.complete("abcabcabc", temperature=0, max_tokens=150, ignore_eos=True, n=2).json()]
        answers.append(server.chat("abcabcabc", temperature=0, max_tokens=120, ignore_eos=True).json())
        said = [answer["speculation"] for answer in answers]
        for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
            expected = sum(s[name] for s in said)
            assert expected > 0
            assert scraped(server, f"spec_decode_{name}_total", drafter="ngram") == expected
        usage = [answer["usage"] for answer in answers]
        assert scraped(server, "prompt_tokens_total") == sum(u["prompt_tokens"] for u in usage)
        assert scraped(server, "generation_tokens_total") == sum(u["completion_tokens"] for u in usage)
        assert scraped(server, "time_to_first_token_seconds_count") == 3
        assert scraped(server, "num_requests_running") == 0
        assert server.client.get("/metrics").headers["content-type"].startswith("text/plain; version=0.0.4")


def test_a_refused_request_is_no_aborted_one() -> None:
    with running_server() as server:
        assert server.complete("x" * 2000, max_tokens=5).status_code == 400
        assert scraped(server, "request_success_total", finished_reason="abort") == 0
        server.generator.gate.clear()
        with connect(server) as client:
            body = json.dumps({"prompt": "abc", "max_tokens": 50}).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n"
            client.sendall(head.encode() + b"content-type: application/json\r\n\r\n" + body)
            wait_until(lambda: bool(server.generator.has_unfinished))
        wait_until(lambda: server.engine.is_idle)  # it is noticed, while the engine is in its step
        server.generator.gate.set()
        wait_until(lambda: scraped(server, "request_success_total", finished_reason="abort") == 1)


def test_a_server_with_the_wrong_draft_raises_the_alarm() -> None:
    target, stranger = (
        TinyModel(vocab_size=272, max_model_len=512, num_blocks=160, kinship=8.0, language=language, seed=language)
        for language in (0, 5)
    )
    drafters = [ModelDrafter("model", stranger, 272)]
    wrong = GatedGenerator(target, ByteTokenizer(), drafters, adaptive=False, native=False)
    with running_server(wrong) as server:
        for i in range(20):
            server.complete(f"question {i}", temperature=0, max_tokens=20, ignore_eos=True)
        assert scraped(server, "spec_decode_acceptance_alarm", drafter="model", kind="low") == 1
        text = server.client.get("/metrics").text
    (cause,) = re.findall(r'spec_decode_acceptance_alarms_total{cause="(\w+)"', text)
    assert cause in ("drafter", "tokenizer")


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


DOCS = Path(__file__).parents[2] / "docs"


def series_names() -> set[str]:
    """Every sample name that a server with some traffic exposes."""
    metrics = make_metrics()
    metrics.attach(make_generator())
    metrics.observe_round(make_round("model:d", 2, 1))
    request = metrics.begin(TRAITS, 1, now=0.0)
    for _ in range(20):
        completion = make_completion(drafts=20, draft_tokens=60, accepted=2)
        request.observe(make_chunk(1, finish_reason="stop", completion=completion), now=1.0)
    families = text_string_to_metric_families(metrics.render().decode())
    return {s.name for f in families for s in f.samples if not s.name.endswith("_created")}


def test_the_dashboard_shows_metrics_that_exist() -> None:
    dashboard = json.loads((DOCS / "grafana" / "foredraft.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    expressions += [v["query"] for v in dashboard["templating"]["list"] if v["type"] == "query"]
    assert len(expressions) > 20
    for expression in expressions:
        names = set(re.findall(r"foredraft:\w+", expression))
        assert names, expression
        assert names <= series_names(), expression
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)


def test_every_metric_is_documented_and_no_other() -> None:
    page = (DOCS / "metrics.md").read_text()
    families = {re.sub(r"_(bucket|count|sum)$", "", name) for name in series_names()}
    assert set(re.findall(r"foredraft:\w+", page)) == families
