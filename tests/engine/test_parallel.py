"""Models of Transformers over two processes: the ids and texts of one, and what becomes of the processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from foredraft import LLM, SamplingParams
from foredraft.errors import EngineFailedError, ForedraftError, ModelFileError, ParameterError, UnsupportedModelError
from foredraft.models.base import Rows
from foredraft.models.hf.follower import Call
from foredraft.models.hf.load import HFOptions, load_hf_model
from foredraft.models.hf.parallel import ParallelModel, load_parallel_model
from foredraft.testing import make_tiny_gguf
from tests.models.hf.folders import write_folder

GREEDY = SamplingParams(temperature=0.0, max_tokens=16)
PROMPTS = ["the cat sat on", "def add(a, b):", "the dog"]
#: Heads of 8 numbers are none of the CPU core's: "auto" leaves these folders to Transformers.
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "tied": {"name": "qwen2", "settings": {"tie_word_embeddings": True}, "padding": 3},  # a head of an odd width
    "mixtral": {},
}
#: Seconds that nothing here comes near, unless it hangs.
PATIENCE = 300.0


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("parallel")
    return {kind: write_folder(root / kind, **{"name": kind, **settings}) for kind, settings in KINDS.items()}


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Like the llama, a little disturbed by another head."""
    return write_folder(tmp_path_factory.mktemp("draft"), seed=0, padding=20)


@pytest.fixture(scope="module")
def two(folders: dict[str, Path]) -> Iterator[Callable[..., LLM]]:
    """LLMs over two processes, which stay from one to the next."""
    with LLM(folders["llama"], tensor_parallel_size=2):
        yield partial(LLM, adaptive=False, num_speculative_tokens=4, tensor_parallel_size=2)


def one(folder: Path, drafter: str = "none", **options: Any) -> LLM:
    return LLM(folder, drafter, adaptive=False, num_speculative_tokens=4, **options)


def followers(parent: int) -> list[int]:
    """Its processes that follow."""
    every = ["ps", "-A", "-ww", "-o", "pid=,ppid=,args="]
    rows = [line.split(maxsplit=2) for line in subprocess.check_output(every, text=True).splitlines()]
    return [int(pid) for pid, ppid, args in rows if int(ppid) == parent and "models.hf.follower" in args]


def wait_until_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + PATIENCE
    while any(Path(f"/proc/{pid}").exists() and not is_zombie(pid) for pid in pids):
        assert time.monotonic() < deadline, "processes stay"
        time.sleep(0.02)


def is_zombie(pid: int) -> bool:
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout
    return not state.strip() or state.startswith("Z")


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_ids_are_those_of_one_process(two: Callable[..., LLM], folders: dict[str, Path], kind: str) -> None:
    with one(folders[kind]) as llm:
        wanted = [c.token_ids for c in llm.generate(PROMPTS, GREEDY)]
    for drafter in ("none", "ngram"):
        with two(folders[kind], drafter) as llm:
            assert [c.token_ids for c in llm.generate(PROMPTS, GREEDY)] == wanted
            assert llm.model.weight_bytes == one(folders[kind]).model.weight_bytes


@pytest.mark.parametrize("size", [1, 2])
def test_a_draft_model_of_its_own_or_shared_out(
    two: Callable[..., LLM], folders: dict[str, Path], draft: Path, size: int
) -> None:
    with one(folders["llama"]) as llm:
        wanted = [c.token_ids for c in llm.generate(PROMPTS, GREEDY)]
    with two(folders["llama"], f"ngram+model:{draft}", draft_tensor_parallel_size=size) as llm:
        answers = llm.generate(PROMPTS, GREEDY)
    assert [c.token_ids for c in answers] == wanted
    assert sum(c.speculation.num_draft_tokens for c in answers)


def test_seeds_parameters_and_streams(two: Callable[..., LLM], folders: dict[str, Path], draft: Path) -> None:
    params = SamplingParams(seed=3, top_p=0.9, max_tokens=12, repetition_penalty=1.2, n=2, logprobs=1)
    texts = []
    for llm in (one(folders["llama"]), two(folders["llama"], f"ngram+model:{draft}")):
        with llm:
            said = dict.fromkeys([(request, choice) for request in range(3) for choice in range(2)], "")
            first = None
            for chunk in llm.stream(PROMPTS, params):
                first = chunk.request_id if first is None else first
                said[chunk.request_id - first, chunk.index] += chunk.text
            texts.append(said)
    assert texts[0] == texts[1]
    assert all(texts[0].values())


def test_trees_hidden_states_and_moved_slots(two: Callable[..., LLM], folders: dict[str, Path]) -> None:
    """The protocol itself, beside one process; each rank keeps its own heads."""
    name, table = str(folders["llama"]), np.array([2, 0], np.int32)
    both = [load_hf_model(name, HFOptions(), kv_cache_tokens=128), load_parallel_model(name, HFOptions(), 2)]
    results = []
    for model in both:
        model.forward([Rows(table, 0, [5, 6, 7, 8, 9], num_logits=0), Rows(np.array([1], np.int32), 0, [9])])
        tree = Rows(table, 5, [10, 11, 12, 13], [-1, 0, 0, 2], num_logits=4)
        seen = [model.forward([tree], hidden_layers=[0, 2]), model.hidden_states()]
        model.move_slots(table, [5, 7, 8], [5, 6, 7])
        results.append([*seen, model.forward([Rows(table, 8, [14, 15], num_logits=2)])])
    for got, wanted in zip(*reversed(results), strict=True):
        np.testing.assert_allclose(got, wanted, atol=2e-4 * np.abs(wanted).max(), rtol=0)
    alone, shared = both
    assert isinstance(shared, ParallelModel)
    keys = [m._cache.layers[0].keys for m in (alone, shared._own)]  # type: ignore[attr-defined]
    assert [k.shape[2] for k in keys] == [2, 1]
    shared.close()
    with pytest.raises(ForedraftError, match="was closed"):
        shared.forward([Rows(table, 0, [5])])


def interrupt_main_thread_when_it_waits() -> None:
    """A signal that comes just before a thread begins to wait is noticed after the wait only."""
    main = threading.main_thread().ident or 0
    while sys._current_frames()[main].f_code.co_name != "wait":
        time.sleep(0.01)
    time.sleep(0.2)
    signal.pthread_kill(main, signal.SIGINT)


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """What is started in the background by a shell ignores SIGINT, and so do its tests."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_in_the_midst_of_a_pass(
    two: Callable[..., LLM], folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever waits for the pass is interrupted; the pass is not, and later ones are right."""
    with two(folders["llama"], "none") as llm:
        wanted = [c.token_ids for c in llm.generate(PROMPTS, GREEDY)]
        own, may_end = llm.model._own, threading.Event()  # type: ignore[attr-defined]
        forward = own.forward

        def slow(*arguments: Any) -> Any:
            interrupt_main_thread_when_it_waits()
            assert may_end.wait(PATIENCE)
            return forward(*arguments)

        monkeypatch.setattr(own, "forward", slow)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, GREEDY)
        monkeypatch.undo()
        may_end.set()
        assert [c.token_ids for c in llm.generate(PROMPTS, GREEDY)] == wanted


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"draft_tensor_parallel_size": 3}, ParameterError, "must be 1 or the target's tensor_parallel_size"),
        ({"tensor_parallel_size": 0}, ParameterError, "tensor_parallel_size must be"),
        ({"device": "cuda:1"}, ParameterError, "device does not go with tensor_parallel_size"),
        ({"device_map": "auto"}, ParameterError, "device_map does not go with tensor_parallel_size"),
        ({"backend": "native"}, UnsupportedModelError, "Transformers may: --backend hf"),
    ],
    ids=str,
)
def test_wrong_wishes(folders: dict[str, Path], options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        LLM(folders["llama"], **{"tensor_parallel_size": 2, **options})


def test_models_that_cannot_be_shared_out(folders: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match=r"of 3 does not divide the heads of llama \(4, and 2 .*\): take 1 or 2"):
        LLM(folders["llama"], tensor_parallel_size=3)
    for kind in ("gpt2", "gpt_oss"):  # no plan; a plan for the embedding only
        with pytest.raises(UnsupportedModelError, match=f"no tensor-parallel plan for the layers of {kind}"):
            LLM(write_folder(tmp_path / kind, kind), tensor_parallel_size=2)
    file = tmp_path / "tiny.gguf"
    make_tiny_gguf("llama", file)
    with pytest.raises(ParameterError, match=r"above 1 is for models of Transformers, and .* runs on the CPU core"):
        LLM(file, tensor_parallel_size=2)
    with pytest.raises(ParameterError, match="draft_tensor_parallel_size above 1 is for models of Transformers"):
        LLM(folders["llama"], f"model:{file}", tensor_parallel_size=2, draft_tensor_parallel_size=2)
    (tmp_path / "gpt2" / "config.json").write_text("{}")
    with pytest.raises(ModelFileError, match="cannot be loaded by Transformers"):
        LLM(tmp_path / "gpt2", tensor_parallel_size=2)


def test_one_size_a_process_and_no_torchrun(
    two: Callable[..., LLM], folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    four = write_folder(tmp_path, settings={"num_key_value_heads": 4})
    with two(folders["llama"]):
        with pytest.raises(ForedraftError, match="of size 2 runs in this process already"):
            LLM(four, tensor_parallel_size=4)
        monkeypatch.setenv("LOCAL_RANK", "1")
        with pytest.raises(ForedraftError, match="a process of torchrun's"):
            two(folders["llama"])


def test_a_killed_process_ends_the_answer_and_another_start_works(two: Callable[..., LLM], folders) -> None:
    wanted = [c.token_ids for c in two(folders["llama"], "none").generate(PROMPTS, GREEDY)]
    (pid,) = followers(os.getpid())
    llm = two(folders["llama"], "none")
    stream = llm.stream(PROMPTS, GREEDY)
    next(stream)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineFailedError, match=rf"rank 1 of 2 \(process {pid}\) was ended by SIGKILL.* start again"):
        list(stream)
    with pytest.raises(EngineFailedError, match="was ended by SIGKILL"):
        llm.generate(PROMPTS, GREEDY)
    with two(folders["llama"], "none") as again:
        assert [c.token_ids for c in again.generate(PROMPTS, GREEDY)] == wanted
        (other,) = followers(os.getpid())
    assert other != pid
    assert followers(os.getpid()) == []  # the last was closed


def test_what_all_refuse_at_load_is_told_in_their_own_words(folders: dict[str, Path]) -> None:
    with pytest.raises(ParameterError, match="max_model_len must lie between 1 and the context of 256 tokens"):
        LLM(folders["llama"], tensor_parallel_size=2, max_model_len=10**6)
    assert followers(os.getpid()) == []


def test_a_fault_of_one_process_is_told(folders: dict[str, Path]) -> None:
    with LLM(folders["llama"], "none", tensor_parallel_size=2) as llm:
        ranks = llm.model._ranks  # type: ignore[attr-defined]
        with pytest.raises(EngineFailedError, match=r"rank 1 of 2: AttributeError: .*no_such_method"):
            ranks.together(Call(0, "no_such_method", ()), lambda _: ranks._state.wait(lambda: False, PATIENCE))
    assert followers(os.getpid()) == []


def test_a_fault_of_this_process_ends_the_others(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(folders["llama"], "none", tensor_parallel_size=2) as llm:
        monkeypatch.setattr(llm.model._own, "_run", lambda *_: 1 // 0)  # type: ignore[attr-defined]
        with pytest.raises(ZeroDivisionError):
            llm.generate(PROMPTS, GREEDY)
        assert followers(os.getpid()) == []


def test_nothing_begins_behind_a_fault_that_nobody_waited_for(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(folders["llama"], "none", tensor_parallel_size=2) as llm:
        may_end = threading.Event()

        def fail(*_: Any) -> None:
            interrupt_main_thread_when_it_waits()
            assert may_end.wait(PATIENCE)
            raise ZeroDivisionError

        monkeypatch.setattr(llm.model._own, "forward", fail)  # type: ignore[attr-defined]
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, GREEDY)
        monkeypatch.undo()
        may_end.set()
        with pytest.raises(EngineFailedError, match="has failed: ZeroDivisionError"):
            llm.generate(PROMPTS, GREEDY)
    assert followers(os.getpid()) == []


def command(folder: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "foredraft", *more[:1], "-m", str(folder), "-tp", "2", "-n", "24", *more[1:]]


def test_the_command_answers(folders: dict[str, Path]) -> None:
    """What it writes to stdout is rank 0's alone, and what it is told on stdin."""
    more = ["generate", "-f", "-", "--raw", "--json"]
    done = subprocess.run(command(folders["llama"], *more), input="the cat", capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with one(folders["llama"]) as llm:
        wanted = llm.generate("the cat", SamplingParams(temperature=0.0, max_tokens=24))[0].token_ids
    assert json.loads(done.stdout)["token_ids"] == list(wanted)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -9), (signal.SIGINT, 130)], ids=str)
def test_nothing_stays_behind(folders: dict[str, Path], tmp_path: Path, number: signal.Signals, code: int) -> None:
    with subprocess.Popen(
        command(folders["llama"], "chat"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdin.write(b"hello\n")
        process.stdin.flush()
        process.stdout.read(1)  # it answers
        children = followers(process.pid)
        assert len(children) == 1
        assert len(list(tmp_path.glob("foredraft-*"))) == 1
        process.send_signal(number)
        assert process.wait(PATIENCE) == code
        assert b"Traceback" not in process.stderr.read()
    wait_until_gone(children)
    assert list(tmp_path.glob("foredraft-*")) == []
