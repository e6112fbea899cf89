"""Folders of Transformers through the library's front door, against the model's own `generate`."""

from __future__ import annotations

from tests.triton_device import DEVICE  # isort: skip  (before any kernel is defined)

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from foredraft import LLM, SamplingParams
from foredraft.errors import (
    MissingExtraError,
    ModelFileError,
    ParameterError,
    TokenizerMismatchError,
    UnsupportedModelError,
)
from foredraft.models.hf import extra
from foredraft.models.hf.load import choose_device_sampler
from foredraft.types import StructuredOutputs
from tests.models.hf.folders import sentencepiece, write_folder
from tests.models.hf.zoo import REFUSED, make_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
PROMPTS = ["the cat sat on", "def add(a, b):", "the dog"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of widths that the CPU core has no kernels for: "auto" leaves it to Transformers."""
    return write_folder(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model of the same tokenizer, with a wider head."""
    return write_folder(tmp_path_factory.mktemp("draft"), "gpt2", seed=4, padding=20)


def own_ids(folder: Path, prompt: str) -> list[int]:
    """Of `generate`, in single precision."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder)
    ids = transformers.AutoTokenizer.from_pretrained(folder)(prompt, return_tensors="pt")["input_ids"]
    output = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24)
    return [int(token) for token in output[0, ids.shape[1] :]]


@pytest.mark.parametrize("spec", ["none", "ngram", "model", "ngram+model"])
def test_greedy_ids_are_generates(folder: Path, draft: Path, spec: str) -> None:
    with LLM(folder, spec.replace("model", f"model:{draft}"), adaptive=False, num_speculative_tokens=4) as llm:
        got = [list(c.token_ids) for c in llm.generate(PROMPTS, GREEDY)]
    assert got == [own_ids(folder, prompt) for prompt in PROMPTS]


def test_seeds_and_parameters_under_speculation(folder: Path, draft: Path) -> None:
    params = SamplingParams(seed=3, top_p=0.9, max_tokens=20, repetition_penalty=1.2, logprobs=2)
    texts = []
    for spec in ("none", f"ngram+model:{draft}"):
        with LLM(folder, spec, adaptive=False, num_speculative_tokens=4) as llm:
            texts.append(
                [(c.text, [entry.token_id for entry in c.logprobs or ()]) for c in llm.generate(PROMPTS, params)]
            )
    assert texts[0] == texts[1]


def test_every_sampler_says_the_same(folder: Path, draft: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton, by the reference on the device, and in C++ on the CPU: greedy, by a seed, and under a grammar."""
    wishes = [
        SamplingParams(temperature=0.0, max_tokens=6, logprobs=1),
        SamplingParams(seed=3, min_p=0.01, max_tokens=6),
        SamplingParams(seed=4, max_tokens=6, structured_outputs=StructuredOutputs(regex="[a-e]+")),
        SamplingParams(max_tokens=6),  # a draft with probabilities; its seed is the engine's own
    ]
    answers: dict[str, list[object]] = {}
    for sampler in ("triton", "array", "native"):
        monkeypatch.setenv("FOREDRAFT_SAMPLER", sampler)
        options = {"adaptive": False, "num_speculative_tokens": 2, "device": DEVICE}
        with LLM(folder, f"model:{draft}", **options) as llm:
            assert (llm.model.device_rows is None) == (sampler == "native")
            *same, free = (llm.generate(PROMPTS[:2], params) for params in wishes)
        answers[sampler] = [[(c.text, c.token_ids) for c in batch] for batch in same]
        assert all(len(c.token_ids) == 6 or c.finish_reason == "stop" for c in free)
        assert sum(c.speculation.num_draft_tokens for c in free) > 0
    assert answers["triton"] == answers["array"] == answers["native"]
    monkeypatch.setenv("FOREDRAFT_SAMPLER", "cuda")
    with pytest.raises(ParameterError, match="FOREDRAFT_SAMPLER must be one of array, native, triton"):
        LLM(folder)


def test_where_rows_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU in Triton, if it is there; without it, and elsewhere, on the CPU."""
    monkeypatch.delenv("FOREDRAFT_SAMPLER", raising=False)
    assert choose_device_sampler(torch.device("cuda:1")) == "triton"
    assert choose_device_sampler(torch.device("cpu")) is None
    assert choose_device_sampler(torch.device("mps")) is None
    monkeypatch.setattr("foredraft.models.hf.load.find_spec", lambda name: None)
    assert choose_device_sampler(torch.device("cuda")) is None


def test_chats_are_rendered_by_the_folders_template(folder: Path) -> None:
    with LLM(folder) as llm:
        ids = llm.render_chat([{"role": "user", "content": "the cat"}])
        text = b"".join(map(llm.tokenizer.token_bytes, ids)).decode()
        assert text == "<|im_start|>user\nthe cat<|im_end|>\n<|im_start|>assistant\n"
        assert llm.chat([{"role": "user", "content": "the cat"}], GREEDY)[0].usage.prompt_tokens == len(ids)


def test_without_the_core(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of Transformers need none of it."""
    with LLM(folder) as llm:
        wanted = llm.generate(PROMPTS, GREEDY)
    monkeypatch.setitem(sys.modules, "foredraft._native", None)
    with LLM(folder) as llm:
        got = llm.generate(PROMPTS, GREEDY)
    assert [c.token_ids for c in got] == [c.token_ids for c in wanted]


def test_precision_is_chosen(folder: Path) -> None:
    with LLM(folder, dtype="bfloat16", fixed_rows=True, num_speculative_tokens=4, device="cpu") as llm:
        assert llm.model.weight_bytes * 2 == sum(p.numel() * 4 for p in make_model_of(folder).parameters())
        assert llm.generate("the cat", GREEDY)[0].token_ids


def make_model_of(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder)


def test_a_draft_of_another_tokenizer(folder: Path, tmp_path: Path) -> None:
    other = write_folder(tmp_path, tokenizer=sentencepiece())
    with LLM(folder, f"model:{other}", adaptive=False, num_speculative_tokens=4) as llm:
        answers = llm.generate(PROMPTS, GREEDY)
    assert [list(a.token_ids) for a in answers] == [own_ids(folder, prompt) for prompt in PROMPTS]
    assert sum(a.speculation.num_draft_tokens for a in answers)
    with pytest.raises(TokenizerMismatchError, match="cross_vocab is off"):
        LLM(folder, f"model:{other}", cross_vocab="off")


def test_eight_unequal_prompts_are_eight_single_runs(folder: Path, draft: Path) -> None:
    prompts = ["the cat sat on the mat, and"[:length] for length in (1, 27, 4, 13, 2, 20, 7, 9)]
    options = {"adaptive": False, "num_speculative_tokens": 4}
    for params in (GREEDY, SamplingParams(seed=3, max_tokens=24)):
        with LLM(folder, f"ngram+model:{draft}", **options) as llm:
            together = [c.token_ids for c in llm.generate(prompts, params)]
        with LLM(folder, "none") as llm:
            assert together == [llm.generate(prompt, params)[0].token_ids for prompt in prompts]


def test_a_trace_by_hand(folder: Path) -> None:
    """The model drafts for itself, four tokens a pass: the prompt's pass says 1 token, then 4 + 1, four times."""
    params = SamplingParams(temperature=0.0, max_tokens=21, ignore_eos=True)
    with LLM(folder, f"model:{folder}", adaptive=False, num_speculative_tokens=4) as llm:
        (answer,) = llm.generate("the cat sat on", params)
    told = answer.speculation
    assert answer.usage.completion_tokens == 21
    assert (told.num_passes, told.num_drafts, told.num_draft_tokens, told.num_accepted_tokens) == (4, 4, 16, 16)
    assert (told.acceptance_rate, told.mean_acceptance_length, told.tokens_per_pass) == (1.0, 5.0, 5.0)
    assert told.accepted_per_position == (4, 4, 4, 4)
    assert told.by_drafter == {"model": {"drafts": 4, "draft_tokens": 16, "accepted_tokens": 16}}
    assert list(answer.origins) == ["target", *(["model"] * 4 + ["target"]) * 4]


@pytest.mark.parametrize("backend", ["hf", "native"])
def test_another_chat_template_is_no_other_tokenizer(backend: str, tmp_path: Path) -> None:
    """As of a base and its instruct version: the draft is native, and speaks to the target in its own tokens."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}  # which the core takes, too
    instruct = write_folder(tmp_path / "instruct", settings=sizes)
    bases = [write_folder(tmp_path / name, settings=sizes) for name in ("other", "none")]
    assert (bases[0] / "chat_template.jinja").exists()
    (bases[0] / "chat_template.jinja").write_text("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    (bases[1] / "chat_template.jinja").unlink()
    params = SamplingParams(temperature=0.0, max_tokens=13, ignore_eos=True)
    for base in bases:
        options = {"backend": backend, "quantize": "auto" if backend == "hf" else "none", "draft_quantize": "none"}
        with LLM(
            instruct, f"model:{base}", cross_vocab="off", adaptive=False, num_speculative_tokens=3, **options
        ) as llm:
            (answer,) = llm.generate("the cat sat on", params)
        assert answer.speculation.num_accepted_tokens == 9  # it is the same model: all that was drafted


def test_models_that_cannot_undo_are_refused(tmp_path: Path) -> None:
    write_folder(tmp_path)
    make_model("jamba", **REFUSED["jamba"]).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="has recurrent state"):
        LLM(tmp_path)


def test_wrong_wishes(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="hf reads folders and hub ids"):
        LLM("smollm2-135m", backend="hf")
    with pytest.raises(ParameterError, match="backend must be one of auto, native, hf"):
        LLM(folder, backend="onnx")  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match="dtype must be one of"):
        LLM(folder, dtype="int3")  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match="device 'nowhere' cannot be used"):
        LLM(folder, device="nowhere")
    with pytest.raises(ParameterError, match="max_model_len must lie between"):
        LLM(folder, max_model_len=1000)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelFileError, match="cannot be loaded by Transformers"):
        LLM(tmp_path, backend="hf")
    with pytest.raises(ModelFileError, match="model_type is missing"):
        LLM(tmp_path)


def test_a_missing_extra_is_named_with_its_cure(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extra, "find_spec", lambda name: None if name == "torch" else object())
    with pytest.raises(MissingExtraError, match=r'torch not installed: pip install "\.\[hf\]"'):
        LLM(folder)


def test_the_command_answers_from_a_folder(folder: Path) -> None:
    command = [sys.executable, "-m", "foredraft", "generate", "-m", str(folder), "-p", "the cat", "--raw", "-n", "24"]
    done = subprocess.run([*command, "--json", "--backend", "hf", "--dtype", "float32"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["token_ids"] == own_ids(folder, "the cat")


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("model.safetensors", lambda data: data[: len(data) // 2]),
        ("model.safetensors", lambda data: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"),
        ("model.safetensors", lambda data: b"\xff" * 64 + data[64:]),
        ("config.json", lambda data: data.replace(b'"num_attention_heads": 4', b'"num_attention_heads": 0')),
        ("config.json", lambda data: data.replace(b'"num_hidden_layers": 2', b'"num_hidden_layers": 2147483648')),
        ("config.json", lambda data: data.replace(b'"hidden_size": 32', b'"hidden_size": "wide"')),
        ("config.json", lambda data: data.replace(b'"intermediate_size": 48', b'"intermediate_size": 64')),
        ("tokenizer.json", lambda data: data[: len(data) // 2]),
        ("generation_config.json", lambda data: b'{"eos_token_id": 1000000000000000000000000000000}'),
        ("generation_config.json", lambda data: b'{"eos_token_id": [[1]]}'),
    ],
)
def test_damaged_folders_are_refused_in_a_line(
    folder: Path, tmp_path: Path, name: str, change: Callable[[bytes], bytes]
) -> None:
    broken = shutil.copytree(folder, tmp_path / "broken")
    file = broken / name
    before = file.read_bytes() if file.exists() else b""
    file.write_bytes(change(before))
    assert file.read_bytes() != before
    with pytest.raises(ModelFileError) as caught:
        LLM(broken, backend="hf")
    assert "\n" not in str(caught.value)
