"""Folders of Transformers on the CPU core, through the library's front door, against the model's own `generate`."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from foredraft import LLM, SamplingParams
from foredraft.errors import MissingExtraError, ModelFileError, ParameterError, UnsupportedModelError
from foredraft.models.hf import extra
from foredraft.models.native import NativeModel
from foredraft.testing import make_tiny_gguf
from tests.models.hf.folders import sentencepiece, write_folder

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
PROMPTS = ["the cat sat on", "def add(a, b):", "the dog"]
DRAFTERS = ["none", "ngram", "model", "ngram+model"]
FAMILIES = ["llama", "qwen2", "qwen3", "gemma3_text"]
#: What the core asks for: widths of whole groups.
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FOREDRAFT_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: write_folder(tmp_path_factory.mktemp(name), name, settings=SIZES) for name in FAMILIES}


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model of the same tokenizer, with a wider head."""
    return write_folder(tmp_path_factory.mktemp("draft"), "qwen3", seed=4, padding=20, settings=SIZES)


@pytest.fixture
def folder(folders: dict[str, Path], tmp_path: Path) -> Path:
    """A copy, to be spoilt."""
    shutil.copytree(folders["llama"], tmp_path / "copy")
    return tmp_path / "copy"


def generate(model: str | Path, drafter: str = "none", **options: Any) -> list[list[int]]:
    wanted = {
        "adaptive": False,
        "num_speculative_tokens": 4,
        "kv_cache_dtype": "f32",
        "backend": "native",
        "threads": 1,
    }
    with LLM(model, drafter, **wanted | options) as llm:
        assert isinstance(llm.model, NativeModel)
        answers = llm.generate(PROMPTS, GREEDY)
    if "model" in drafter:
        assert sum(answer.speculation.num_draft_tokens for answer in answers)
    return [list(answer.token_ids) for answer in answers]


def own_ids(folder: Path, prompt: str) -> list[int]:
    """Of `generate`, in single precision."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder)
    ids = transformers.AutoTokenizer.from_pretrained(folder)(prompt, return_tensors="pt")["input_ids"]
    output = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24)
    return [int(token) for token in output[0, ids.shape[1] :]]


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_ids_are_generates(folders: dict[str, Path], draft: Path, family: str) -> None:
    folder = folders[family]
    wanted = [own_ids(folder, prompt) for prompt in PROMPTS]
    for spec in DRAFTERS:
        assert generate(folder, spec.replace("model", f"model:{draft}"), quantize="none") == wanted, spec


@pytest.mark.parametrize("quantize", ["q8", "q4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_with_rounded_weights_drafts_change_nothing(
    folders: dict[str, Path], draft: Path, family: str, quantize: str
) -> None:
    plain = generate(folders[family], quantize=quantize)
    for spec in DRAFTERS[1:]:
        assert generate(folders[family], spec.replace("model", f"model:{draft}"), quantize=quantize) == plain, spec


def test_what_auto_means(folders: dict[str, Path], tmp_path: Path) -> None:
    """The weights of a folder become q8; a GGUF file keeps its own."""
    sizes = {}
    for quantize in ("auto", "q8", "q4", "none"):
        with LLM(folders["llama"], quantize=quantize, threads=1) as llm:
            assert isinstance(llm.model, NativeModel)
            sizes[quantize] = llm.model.weight_bytes
    assert sizes["auto"] == sizes["q8"]
    assert sizes["q4"] < sizes["q8"] < sizes["none"]
    make_tiny_gguf("llama", tmp_path / "tiny.gguf")
    own = []
    for quantize in ("auto", "none", "q4"):
        with LLM(tmp_path / "tiny.gguf", quantize=quantize, threads=1) as llm:
            own.append(llm.model.weight_bytes)
    assert own[0] == own[1] > own[2]


def test_a_folder_and_a_gguf_file_draft_for_each_other(folders: dict[str, Path], tmp_path: Path) -> None:
    make_tiny_gguf("qwen3", tmp_path / "tiny.gguf")
    for target, draft in ((folders["llama"], tmp_path / "tiny.gguf"), (tmp_path / "tiny.gguf", folders["llama"])):
        assert generate(target, f"model:{draft}") == generate(target)


def test_a_draft_of_another_tokenizer(folders: dict[str, Path], tmp_path: Path) -> None:
    other = write_folder(tmp_path / "other", tokenizer=sentencepiece(), settings=SIZES)
    assert generate(folders["llama"], f"model:{other}") == generate(folders["llama"])


def test_a_tokenizer_with_more_tokens_than_the_model(tmp_path: Path) -> None:
    """As Gemma 3 has it: what no row stands for is never said, and refused in prompts."""
    folder = write_folder(tmp_path, padding=-1, settings=SIZES)
    with LLM(folder, quantize="none", threads=1) as llm:
        last = llm.model.vocab_size
        assert llm.tokenizer.vocab_size == last + 1
        sampled = SamplingParams(seed=1, max_tokens=20, min_tokens=5, logprobs=3, top_k=5)
        assert all(token < last for answer in llm.generate(PROMPTS, sampled) for token in answer.token_ids)
        with pytest.raises(ParameterError, match="outside"):
            llm.generate([[last]], GREEDY)


def test_chats_are_rendered_by_the_folders_template(folders: dict[str, Path]) -> None:
    with LLM(folders["llama"], threads=1) as llm:
        ids = llm.render_chat([{"role": "user", "content": "the cat"}])
        text = b"".join(map(llm.tokenizer.token_bytes, ids)).decode()
    assert text == "<|im_start|>user\nthe cat<|im_end|>\n<|im_start|>assistant\n"


def test_neither_torch_nor_transformers_is_imported(folders: dict[str, Path], draft: Path) -> None:
    program = (
        "import sys; from foredraft import LLM, SamplingParams\n"
        f"with LLM({str(folders['qwen3'])!r}, 'ngram+model:{draft}', threads=1) as llm:\n"
        "    llm.generate('the cat', SamplingParams(max_tokens=4))\n"
        "print([name for name in ('torch', 'transformers', 'safetensors') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_a_second_start_packs_nothing(folders: dict[str, Path]) -> None:
    seen: list[str] = []
    for _ in range(2):
        seen.append("")
        with LLM(folders["llama"], threads=1, progress=lambda what, done, total: seen.append(what)):
            pass
    assert seen.count("") == 2
    assert seen[-1] == ""
    assert f"repacking {folders['llama'].name}" in seen


@pytest.mark.parametrize(
    "options", [{"dtype": "float32"}, {"device": "cpu"}, {"fixed_rows": True}, {"trust_remote_code": True}]
)
def test_what_only_transformers_knows_is_for_it(folders: dict[str, Path], options: dict[str, Any]) -> None:
    with LLM(folders["llama"], **options) as llm:
        assert not isinstance(llm.model, NativeModel)
        assert [list(c.token_ids) for c in llm.generate(PROMPTS[:1], GREEDY)] == [own_ids(folders["llama"], PROMPTS[0])]
    with pytest.raises(ParameterError, match=f"quantize is for models on the CPU core, .* knows {next(iter(options))}"):
        LLM(folders["llama"], quantize="q4", **options)
    with LLM(folders["llama"], backend="native", threads=1, **options) as llm:
        assert isinstance(llm.model, NativeModel)


def test_a_family_that_the_core_does_not_know(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_folder(tmp_path / "gpt2", "gpt2")
    with caplog.at_level(logging.INFO, logger="foredraft"), LLM(folder) as llm:
        assert not isinstance(llm.model, NativeModel)
    assert "runs by Transformers: " in caplog.text
    assert "the CPU core does not run 'gpt2' models" in caplog.text
    with pytest.raises(UnsupportedModelError, match=r"does not run 'gpt2' models; .* Transformers may: --backend hf"):
        LLM(folder, backend="native")
    with pytest.raises(ParameterError, match=r"quantize is for models on the CPU core, .*gpt2"):
        LLM(folder, quantize="q8")


def test_without_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_folder(tmp_path / "gpt2", "gpt2")
    monkeypatch.setattr(extra, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"'gpt2' models.*torch and transformers not installed: pip install"):
        LLM(folder)


def test_without_the_core_folders_run_by_transformers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "foredraft._native", None)
    with LLM(folder) as llm:
        assert not isinstance(llm.model, NativeModel)


def test_damage_is_no_reason_for_another_backend(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])
    with pytest.raises(ModelFileError, match=r"model\.safetensors: not a sound safetensors file: it is cut short"):
        LLM(folder)


def test_a_folder_without_tokenizer_json(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UnsupportedModelError, match=r"no tokenizer\.json"):
        LLM(folder, backend="native")


def test_the_command_answers_from_a_folder(folders: dict[str, Path]) -> None:
    folder = folders["llama"]
    command = [sys.executable, "-m", "foredraft", "generate", "-m", str(folder), "-p", "the cat", "--raw", "-n", "24"]
    command += ["--json", "--quantize", "none", "--kv-cache-dtype", "f32"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["token_ids"] == own_ids(folder, "the cat")
    done = subprocess.run([*command, "--backend", "hf", "--quantize", "q4"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "--quantize is for models on the CPU core" in done.stderr
