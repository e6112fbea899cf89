"""Keys, limits and queues: who may ask, how much, and how many at once."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from time import monotonic, sleep
from typing import Any

import httpx
import pytest

from foredraft.server import limits
from foredraft.server.auth import prefix_salt
from foredraft.server.logs import JSONLines, RequestRecord
from tests.server.serving import PATIENCE, Server, connect, make_generator, running_server
from tests.server.test_errors import error_of

TEXT = "/v1/completions"
FOREVER = {"prompt": "abc", "ignore_eos": True, "max_tokens": 400}


def eventually(condition: Callable[[], bool]) -> bool:
    """Whether it comes true before patience ends."""
    deadline = monotonic() + PATIENCE
    while not condition():
        if monotonic() > deadline:
            return False
        sleep(0.005)
    return True


def is_idle(server: Server) -> bool:
    return not server.generator.has_unfinished and server.engine.snapshot().num_running == 0


def request_bytes(fields: dict[str, Any], path: str = TEXT, host: str = "x") -> bytes:
    body = json.dumps(fields).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


@pytest.fixture(scope="module")
def locked() -> Iterator[Server]:
    with running_server(api_keys=("open-sesame", "second key")) as running:
        yield running


@pytest.mark.parametrize(
    "given",
    [
        None,
        "",
        "Bearer",
        "Bearer open-sesam",
        "Bearer open-sesame2",
        "Beareropen-sesame",
        "open-sesame",
        "Basic open-sesame",
    ],
)
def test_without_a_key_nothing_is_told(locked: Server, given: str | None) -> None:
    headers = {} if given is None else {"authorization": given}
    for method, path in (("GET", "/v1/models"), ("POST", TEXT), ("POST", "/tokenize"), ("GET", "/nothing")):
        response = locked.client.request(method, path, headers=headers, json={"prompt": "x"})
        assert error_of(response, 401)["code"] == "invalid_api_key"
        assert response.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("key", ["open-sesame", "second key"])
@pytest.mark.parametrize("start", ["Bearer ", "bearer ", "BEARER   ", "Bearer\t"])
def test_each_key_opens(locked: Server, start: str, key: str) -> None:
    response = locked.client.get("/v1/models", headers={"authorization": start + key})
    assert response.status_code == 200


@pytest.mark.parametrize("path", ["/health", "/live", "/version", "/metrics", "/openapi.json"])
def test_machines_need_no_key(locked: Server, path: str) -> None:
    assert locked.client.get(path).status_code == 200


def test_cached_prompts_are_kept_apart_by_key_and_salt() -> None:
    salts = {prefix_salt(tenant, salt, share=False) for tenant in ("", "a", "b") for salt in ("", "a", "b")}
    assert len(salts) == 9
    assert prefix_salt("", "", share=False) == ""
    assert prefix_salt("a", "s", share=True) == prefix_salt("b", "s", share=True) != prefix_salt("a", "t", share=True)
    assert prefix_salt("a", "", share=True) == ""


def test_one_keys_prompts_do_not_speed_up_anothers(locked: Server) -> None:
    def hits(key: str, **fields: Any) -> int:
        before = locked.engine.snapshot().prefix_cache_hits
        headers = {"authorization": f"Bearer {key}"}
        body = {"prompt": "the same long prompt of both " * 5, "max_tokens": 2, **fields}
        assert locked.client.post(TEXT, json=body, headers=headers).status_code == 200
        return locked.engine.snapshot().prefix_cache_hits - before

    assert hits("open-sesame") == 0
    assert hits("open-sesame") > 0
    assert hits("second key") == 0
    assert hits("second key") > 0
    assert hits("second key", cache_salt="mine") == 0


def test_a_body_that_is_too_large() -> None:
    with running_server(max_body_bytes=1000) as server:
        assert server.complete("x" * 100, max_tokens=1).status_code == 200
        assert error_of(server.complete("x" * 1000), 413)["code"] == "request_too_large"
        chunks = (b"x" * 100 for _ in range(50))
        response = server.client.post(TEXT, content=chunks, headers={"content-type": "application/json"})
        error_of(response, 413)
        # Nothing of an announced body is waited for.
        with connect(server) as sock:
            sock.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100000000000\r\n\r\n")
            assert sock.recv(100).startswith(b"HTTP/1.1 413")


def test_the_longest_answer_is_the_operators_to_say() -> None:
    with running_server(max_completion_tokens=10) as server:
        error = error_of(server.chat("x", max_completion_tokens=11), 400)
        assert error["param"] == "max_completion_tokens"
        assert server.chat("x", ignore_eos=True).json()["usage"]["completion_tokens"] == 10


def test_a_full_queue_is_told_at_once_and_empties() -> None:
    generator = make_generator(max_num_seqs=1)
    with running_server(generator, max_num_waiting=2) as server, ThreadPoolExecutor() as pool:
        generator.gate.clear()
        answers = [pool.submit(server.complete, "abc", max_tokens=3)]
        assert eventually(lambda: generator.has_unfinished)
        answers += [pool.submit(server.complete, "abc", max_tokens=3, n=2)]
        assert eventually(lambda: server.engine.num_waiting == 3)
        refused = server.complete("abc", max_tokens=3)
        error = error_of(refused, 429)
        assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
        assert int(refused.headers["retry-after"]) >= 1
        assert server.client.get("/health").status_code == 200
        generator.gate.set()
        assert [answer.result(PATIENCE).status_code for answer in answers] == [200, 200]
        assert server.complete("abc", max_tokens=3).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_stops_its_request_within_a_step(stream: bool) -> None:
    generator = make_generator()
    with running_server(generator) as server:
        with connect(server) as sock:
            generator.gate.clear()
            sock.sendall(request_bytes({**FOREVER, "stream": stream}))
            assert eventually(lambda: generator.has_unfinished)
        assert eventually(lambda: server.engine.is_idle)  # noticed, while the engine is in its step
        steps = generator.num_steps
        generator.gate.set()
        assert eventually(lambda: is_idle(server))
        assert generator.num_steps <= steps + 1
        generator.engine.check_integrity()
        assert server.complete("abc", max_tokens=2).status_code == 200


def test_a_client_killed_in_mid_stream() -> None:
    with running_server() as server:
        for _ in range(3):
            with connect(server) as sock:
                sock.sendall(request_bytes({**FOREVER, "stream": True}))
                assert sock.recv(200).startswith(b"HTTP/1.1 200")
        assert eventually(lambda: is_idle(server))
        server.generator.engine.check_integrity()


def test_a_slow_reader_holds_nobody_up() -> None:
    with running_server() as server, connect(server) as sock:
        sock.sendall(request_bytes({**FOREVER, "stream": True, "logprobs": 5}))
        answers = [server.complete("abc", seed=1, max_tokens=30).json()["choices"] for _ in range(3)]
        assert answers[0] == answers[1] == answers[2]
        assert eventually(lambda: is_idle(server))
        received = b""
        while b"[DONE]" not in received:
            received += sock.recv(1000)
        assert received.startswith(b"HTTP/1.1 200")


def test_while_the_model_loads_the_server_says_so() -> None:
    may_load = threading.Event()
    with running_server(may_load=may_load) as server:
        assert (server.client.get("/health").status_code, server.client.get("/health").json()) == (
            503,
            {"status": "loading"},
        )
        assert server.client.get("/live").status_code == server.client.get("/version").status_code == 200
        for refused in (server.complete("x"), server.chat("x"), server.client.get("/v1/models")):
            assert error_of(refused, 503)["code"] == "service_unavailable"
            assert "retry-after" in refused.headers
        may_load.set()
        assert eventually(lambda: server.client.get("/health").status_code == 200)
        assert server.complete("x", max_tokens=1).status_code == 200


def test_draining_lets_requests_end_and_takes_no_more() -> None:
    generator = make_generator()
    with running_server(generator) as server, ThreadPoolExecutor() as pool:
        generator.gate.clear()
        running = pool.submit(server.complete, "abc", max_tokens=40, ignore_eos=True)
        assert eventually(lambda: generator.has_unfinished)
        drained = asyncio.run_coroutine_threadsafe(server.engine.drain(), server.loop)
        assert eventually(lambda: server.engine.state == "draining")
        refused = server.complete("abc")
        assert error_of(refused, 503)["code"] == "service_unavailable"
        assert "retry-after" in refused.headers
        assert server.client.get("/health").json() == {"status": "draining"}
        assert server.client.get("/health").status_code == 503
        assert server.client.get("/live").status_code == 200
        assert not drained.done()
        generator.gate.set()
        drained.result(PATIENCE)
        assert running.result(PATIENCE).json()["usage"]["completion_tokens"] == 40


def test_other_origins_may_ask_only_where_allowed() -> None:
    preflight = {"origin": "https://app.example", "access-control-request-method": "POST"}
    with running_server() as server:
        assert "access-control-allow-origin" not in server.client.options(TEXT, headers=preflight).headers
    with running_server(allowed_origins=("https://app.example",), api_keys=("key",)) as server:
        answer = server.client.options(TEXT, headers=preflight)
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "https://app.example")
        answer = server.client.options(TEXT, headers={**preflight, "origin": "https://evil.example"})
        assert answer.status_code == 400
        answer = server.client.post(TEXT, json={}, headers={"origin": "https://app.example"})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (401, "https://app.example")


@pytest.mark.parametrize("log_prompts", [False, True])
def test_the_log_has_a_line_a_request_and_no_prompt(caplog: pytest.LogCaptureFixture, log_prompts: bool) -> None:
    caplog.set_level(logging.INFO, "foredraft.requests")
    with running_server(log_prompts=log_prompts) as server:
        response = server.complete([ord("s"), 77, 78, 79], max_tokens=3, ignore_eos=True)
        server.client.get("/health")
        assert eventually(lambda: len(caplog.records) >= 1)
    (record,) = [r for r in caplog.records if r.name == "foredraft.requests"]
    told = record.request  # type: ignore[attr-defined]
    assert isinstance(told, RequestRecord)
    assert told.request_id == response.headers["x-request-id"]
    assert (told.path, told.status, told.prompt_tokens, told.completion_tokens) == (TEXT, 200, 4, 3)
    assert f"3 completion tokens (length), id {told.request_id}" in record.getMessage()
    line = json.loads(JSONLines().format(record))
    assert line["request_id"] == told.request_id
    assert line["finish_reasons"] == ["length"]
    assert ("prompt" in line) is log_prompts
    assert ("77, 78, 79" in record.getMessage()) is log_prompts


def test_a_text_that_cannot_fit_is_refused_before_it_becomes_tokens() -> None:
    generator = make_generator()
    longest = generator.capacity * generator.tokenizer.max_token_length
    read: list[int] = []
    encode = generator.tokenizer.encode

    def count(text: str, **options: Any) -> list[int]:
        read.append(len(text))
        return encode(text, **options)

    generator.tokenizer.encode = count  # type: ignore[method-assign]
    with running_server(generator) as server:
        for response, param in (
            (server.complete("x" * (longest + 1)), "prompt"),
            (server.complete(["x", "x" * (longest + 1)]), "prompt"),
            (server.chat("x" * longest), "messages"),
        ):
            error = error_of(response, 400)
            assert (error["param"], error["code"]) == (param, "context_length_exceeded")
            assert "characters and the context holds 512 tokens" in error["message"]
        assert max(read) < 100
        assert error_of(server.complete("x" * longest), 400)["code"] == "context_length_exceeded"
        assert read[-1] == longest
        assert server.post("/tokenize", prompt="x" * (longest + 1)).json()["count"] == longest + 1


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "user", "content": "x" * 5000}]},
        {"tools": [{"type": "function", "function": {"name": "f", "description": "x" * 5000}}]},
        {"chat_template_kwargs": {"extra": "x" * 5000}},
        {"messages": [{"role": "user", "content": "x", "name": "x" * 5000}]},
    ],
    ids=lambda fields: "+".join(fields),
)
def test_whatever_is_large_becomes_tokens_off_the_loop(fields: dict[str, Any]) -> None:
    generator = make_generator()
    threads = []
    encode = generator.tokenizer.encode

    def record(text: str, **options: Any) -> list[int]:
        threads.append(threading.current_thread())
        return encode(text, **options)

    generator.tokenizer.encode = record  # type: ignore[method-assign]
    with running_server(generator) as server:
        loop_thread = asyncio.run_coroutine_threadsafe(_this_thread(), server.loop).result(PATIENCE)
        body = {"messages": [{"role": "user", "content": "x"}], **fields}
        server.post("/tokenize", **body)
        server.post("/v1/chat/completions", max_tokens=1, **body)
        assert len(threads) >= 2
        assert loop_thread not in threads


async def _this_thread() -> threading.Thread:
    return threading.current_thread()


def test_draining_waits_for_no_body() -> None:
    with running_server() as server, connect(server) as sock:
        sock.sendall(request_bytes({"prompt": "x" * 100})[:-50])
        assert server.client.get("/live").status_code == 200  # the first request has been begun
        asyncio.run_coroutine_threadsafe(server.engine.drain(), server.loop).result(PATIENCE)
        answer = sock.recv(1000)
        assert answer.startswith(b"HTTP/1.1 503")
        assert b"retry-after" in answer
        assert server.client.get("/live").status_code == 200
        assert error_of(server.complete("x"), 503)["code"] == "service_unavailable"


def test_a_head_that_does_not_come_closes_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HEADERS_DEADLINE", 0.3)
    with running_server() as server:
        for begin in (b"", b"GET /live HTTP/1.1\r\nhost: x\r\n"):
            with connect(server) as sock:
                sock.sendall(begin)
                assert sock.recv(100) == b""
        with connect(server) as sock:  # one that has had an answer, and begins another request
            sock.sendall(b"GET /live HTTP/1.1\r\nhost: x\r\n\r\nGET /live")
            received = b""
            while piece := sock.recv(1000):
                received += piece
            assert received.count(b"HTTP/1.1") == 1
            assert received.endswith(b'{"status":"live"}')


def test_an_answer_may_take_longer_than_a_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HEADERS_DEADLINE", 0.3)
    generator = make_generator()
    with running_server(generator) as server, connect(server) as sock, connect(server) as other:
        generator.gate.clear()
        sock.sendall(request_bytes({**FOREVER, "max_tokens": 3}))
        assert other.recv(100) == b""  # its time was over
        generator.gate.set()
        assert sock.recv(1000).startswith(b"HTTP/1.1 200")


def test_pipelined_requests_are_answered_in_order(locked: Server) -> None:
    with connect(locked) as sock:
        sock.sendall(b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n" * 20)
        received = b""
        while received.count(b"HTTP/1.1 200") < 20:
            received += sock.recv(10_000)


def test_more_connections_than_there_is_room_for_are_closed_at_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(limits.HTTPConnection, "max_connections", 3)
    monkeypatch.setattr(limits.HTTPConnection, "_told", -limits.SILENCE)
    with running_server() as server, caplog.at_level(logging.WARNING), ExitStack() as stack:
        within = [stack.enter_context(connect(server)) for _ in range(3)]
        for _ in range(2):  # who is in is served
            for sock in within:
                sock.sendall(b"GET /live HTTP/1.1\r\nhost: x\r\n\r\n")
                received = b""
                while not received.endswith(b'{"status":"live"}'):
                    received += sock.recv(1000)
                assert received.startswith(b"HTTP/1.1 200")
            for _ in range(20):
                with connect(server) as sock, suppress(ConnectionError):
                    assert sock.recv(1) == b""
        within.pop().close()
        assert eventually(lambda: _is_live(server))
    assert caplog.text.count("more are closed at once") == 1


def _is_live(server: Server) -> bool:
    with suppress(httpx.TransportError):
        return server.client.get("/live").status_code == 200
    return False


def test_large_texts_are_refused_and_tokenised_one_at_a_time() -> None:
    generator = make_generator()
    encode, running, most = generator.tokenizer.encode, [], []

    def slow(text: str, **options: Any) -> list[int]:
        running.append(text)
        most.append(len(running))
        sleep(0.05)
        running.pop()
        return encode(text, **options)

    generator.tokenizer.encode = slow  # type: ignore[method-assign]
    with running_server(generator) as server, ThreadPoolExecutor(6) as pool:
        error = error_of(server.post("/tokenize", prompt="x" * (2 << 20)), 400)
        assert "send at most 2097152 at once" in error["message"]
        answers = [pool.submit(server.post, "/tokenize", prompt="x" * 5000) for _ in range(6)]
        assert {answer.result().json()["count"] for answer in answers} == {5000}
    assert max(most) == 1
