"""Tokenizers of folders without Transformers: ids, ends, control tokens and templates are those of the library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from foredraft.errors import ModelFileError, UnsupportedModelError
from foredraft.models.chat_template import encode_chat
from foredraft.models.fast_tokenizer import FastTokenizer
from foredraft.models.folder.tokenizer import read_folder_tokenizer
from foredraft.models.hf.load import HFOptions, read_hf_tokenizer
from tests.models.hf.folders import END, TEMPLATE, byte_level, sentencepiece

TEXTS = ["the cat", " the  cats\n\tsat", "", "naïve 日本語 🦊", "a\x00b\r\n", f"<think>no{END}", "ends in a blank "]
CHAT = [{"role": "user", "content": f"the cat{END}"}]


def write(folder: Path, tokenizer: Any, **settings: Any) -> Path:
    """As `save_pretrained` does, with more in tokenizer_config.json."""
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "llama", "eos_token_id": 7}')
    change(folder / "tokenizer_config.json", **settings)
    return folder


def change(path: Path, **settings: Any) -> None:
    before = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(before | settings))


def assert_is_the_librarys(folder: Path) -> FastTokenizer:
    ours, theirs = read_folder_tokenizer(folder), transformers.AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        assert ours.encode(text, add_special=True, parse_special=True) == theirs(text)["input_ids"]
        assert ours.encode(text, parse_special=True) == theirs(text, add_special_tokens=False)["input_ids"]
    assert (ours.bos_id, ours.eos_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert ours.vocab_size == len(theirs)
    special = {id for id, token in theirs.added_tokens_decoder.items() if token.special}
    assert {id for id in range(ours.vocab_size) if ours.is_special(id)} == special | ours.eos_ids
    assert ours.chat_template == theirs.chat_template
    return ours


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
def test_ids_are_the_librarys(make: Any, tmp_path: Path) -> None:
    assert_is_the_librarys(write(tmp_path, make()))


@pytest.mark.parametrize(
    "settings",
    [
        {"add_bos_token": True},
        {"add_bos_token": False},
        {"add_eos_token": True, "add_bos_token": True},
        {"eos_token": {"__type": "AddedToken", "content": "</s>", "lstrip": False, "normalized": False}},
        {"extra_special_tokens": ["<|more|>"]},
        {"extra_special_tokens": [], "additional_special_tokens": ["<|more|>"]},
        {"pad_token": "<|padding|>"},
        {"added_tokens_decoder": {"400": {"content": "<|late|>", "special": True, "normalized": False}}},
    ],
)
@pytest.mark.parametrize("make", [byte_level, sentencepiece])
def test_settings_beside_the_tokenizer(make: Any, settings: dict[str, Any], tmp_path: Path) -> None:
    assert_is_the_librarys(write(tmp_path, make(), **settings))


def test_ends_are_those_of_both_backends(tmp_path: Path) -> None:
    folder = write(tmp_path, byte_level())
    end = read_folder_tokenizer(folder).eos_id
    assert read_folder_tokenizer(folder).eos_ids == {7, end}  # config.json's
    for ends in ([3, 5], 4):
        change(folder / "generation_config.json", eos_token_id=ends)
        assert read_folder_tokenizer(folder).eos_ids == read_hf_tokenizer(str(folder), HFOptions()).eos_ids
    assert read_folder_tokenizer(folder).eos_ids == {4, end}


def test_templates(tmp_path: Path) -> None:
    folder = write(tmp_path, byte_level())
    assert (folder / "chat_template.jinja").read_text() == TEMPLATE
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = read_folder_tokenizer(folder)
    honest = [{"role": "user", "content": "the cat"}]
    wanted = theirs.apply_chat_template(honest, add_generation_prompt=True, tokenize=False)
    assert encode_chat(ours, honest) == theirs(wanted, add_special_tokens=False)["input_ids"]
    assert encode_chat(ours, CHAT).count(ours.eos_id or 0) == 1  # the template's own
    (folder / "chat_template.jinja").unlink()
    assert read_folder_tokenizer(folder).chat_template is None
    change(folder / "tokenizer_config.json", chat_template="plain")
    assert read_folder_tokenizer(folder).chat_template == "plain"
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "usual"}]
    change(folder / "tokenizer_config.json", chat_template=named)
    assert read_folder_tokenizer(folder).chat_template == "usual"


@pytest.mark.parametrize(
    ("name", "text", "kind", "problem"),
    [
        ("tokenizer.json", None, UnsupportedModelError, "no tokenizer.json"),
        ("tokenizer.json", "{}", ModelFileError, "no tokenizer of the tokenizers library"),
        ("tokenizer.json", "\0", ModelFileError, "no tokenizer of the tokenizers library"),
        ("tokenizer_config.json", "[]", ModelFileError, "holds no JSON object"),
        ("generation_config.json", '{"eos_token_id": "x"}', ModelFileError, "eos_token_id is no token id"),
        ("generation_config.json", '{"eos_token_id": [true]}', ModelFileError, "eos_token_id is no token id"),
        ("generation_config.json", '{"eos_token_id": 2147483648}', ModelFileError, "eos_token_id is no token id"),
    ],
)
def test_files_that_are_damaged(
    name: str, text: str | None, kind: type[Exception], problem: str, tmp_path: Path
) -> None:
    folder = write(tmp_path, byte_level())
    (folder / name).unlink(missing_ok=True)
    if text is not None:
        (folder / name).write_text(text)
    with pytest.raises(kind, match=problem) as caught:
        read_folder_tokenizer(folder)
    assert str(caught.value).startswith(str(folder))
    assert "\n" not in str(caught.value)
