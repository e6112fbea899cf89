"""The shipped prompts are as many, as long and as different as the figures made with them claim."""

import json
import re
from itertools import combinations
from pathlib import Path

import pytest

from foredraft.bench.workloads import GROUPS, Prompt, load_group, load_workload, read_prompts
from foredraft.errors import ParameterError
from foredraft.models.gguf import read_gguf
from foredraft.models.hub import resolve
from foredraft.models.tokenizer import Tokenizer

LONG_SOURCE_CHARS = 3600  # 800 tokens of English prose, with a margin
MIN_CODE_LINES = 80


@pytest.mark.parametrize("group", GROUPS)
def test_a_group_has_twelve_prompts_of_its_own_category(group: str) -> None:
    prompts = load_group(group)
    assert len(prompts) >= 12
    assert {prompt.category for prompt in prompts} == {group}


def test_ids_and_texts_are_unique() -> None:
    prompts = load_workload("all")
    assert len({prompt.id for prompt in prompts}) == len(prompts)
    assert len({prompt.turns[0] for prompt in prompts}) == len(prompts)


@pytest.mark.parametrize("group", ["summarising", "retrieval"])
def test_source_texts_are_long_enough(group: str) -> None:
    assert min(len(source_of(prompt)) for prompt in load_group(group)) >= LONG_SOURCE_CHARS


def source_of(prompt: Prompt) -> str:
    """The turn without its first paragraph, which is the task, and without the question at the end."""
    source = prompt.turns[0].partition("\n\n")[2]
    return source.rpartition("\n\nQuestion:")[0] or source


@pytest.mark.real
def test_source_texts_have_800_tokens_of_smollm2() -> None:
    assert shortest_source("smollm2-135m") >= 800


@pytest.mark.pair
def test_source_texts_have_800_tokens_of_qwen() -> None:
    assert shortest_source("qwen2.5-coder-1.5b") >= 800


def shortest_source(model: str) -> int:
    tokenizer = Tokenizer(read_gguf(resolve(model)).metadata)
    prompts = [prompt for group in ("summarising", "retrieval") for prompt in load_group(group)]
    return min(len(tokenizer.encode(source_of(prompt))) for prompt in prompts)


@pytest.mark.parametrize("group", ["summarising", "retrieval", "editing"])
def test_no_two_prompts_share_a_source(group: str) -> None:
    texts = [{tuple(words) for words in shingles(prompt.turns[0])} for prompt in load_group(group)]
    assert all(len(a & b) < 0.02 * min(len(a), len(b)) for a, b in combinations(texts, 2))


def shingles(text: str, width: int = 8) -> list[list[str]]:
    words = text.split()
    return [words[i : i + width] for i in range(len(words) - width)]


def test_editing_shows_a_whole_file_and_asks_for_it_back() -> None:
    for prompt in load_group("editing"):
        task, code = re.fullmatch(r"(.*?)\n```\w+\n(.*)\n```", prompt.turns[0], re.DOTALL).groups()
        assert code.count("\n") + 1 >= MIN_CODE_LINES, prompt.id
        assert re.search(r"(entire|whole|full|complete) (file|module|script)", task), prompt.id


def test_python_in_editing_compiles() -> None:
    modules = re.findall(r"```python\n(.*?)\n```", "\n".join(p.turns[0] for p in load_group("editing")), re.DOTALL)
    assert len(modules) >= 6
    for module in modules:
        compile(module, "prompt", "exec")


def test_a_file_in_the_form_of_spec_bench(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    lines = [{"question_id": 85, "category": "writing", "turns": ["a", "b"]}, {"turns": ["c"]}]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    assert load_workload(str(path)) == [Prompt("85", "writing", ("a", "b")), Prompt("2", "mine", ("c",))]


def test_the_limit_counts_by_category() -> None:
    prompts = load_workload("all", limit=2)
    assert [prompt.category for prompt in prompts] == [group for group in GROUPS for _ in range(2)]


@pytest.mark.parametrize("line", [b"{", b'{"turns": []}', b'{"turns": "a"}', b"[1]", b'{"turns": [""]}', b"\xff"])
def test_a_bad_line_is_named(line: bytes) -> None:
    with pytest.raises(ParameterError, match="mine, line 2"):
        read_prompts(b'{"turns": ["a"]}\n' + line, "x", "mine")


@pytest.mark.parametrize("name", ["poetry", "missing.jsonl"])
def test_an_unknown_name_lists_the_known_ones(name: str) -> None:
    with pytest.raises(ParameterError, match="chat, coding"):
        load_workload(name)


def test_an_empty_file_is_refused() -> None:
    with pytest.raises(ParameterError, match="no prompts"):
        read_prompts(b"\n", "x", "empty.jsonl")
