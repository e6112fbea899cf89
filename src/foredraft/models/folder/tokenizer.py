"""The tokenizer of a folder: tokenizer.json, and what the files beside it say of ends, begins and chats."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from foredraft.errors import ModelFileError, UnsupportedModelError
from foredraft.models.fast_tokenizer import FastTokenizer
from foredraft.models.folder.safetensors import read_json

TOKENIZER = "tokenizer.json"
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def check_tokenizer(folder: str | os.PathLike[str]) -> None:
    """Raises UnsupportedModelError for a folder without tokenizer.json."""
    if not Path(folder, TOKENIZER).is_file():
        raise UnsupportedModelError(f"{os.fspath(folder)}: no {TOKENIZER}, the only kind of tokenizer that is read")


def read_folder_tokenizer(folder: str | os.PathLike[str]) -> FastTokenizer:
    """Ids, control tokens and template are those that Transformers takes from the same files.

    What a text begins with is in tokenizer.json: `add_bos_token` of tokenizer_config.json is for other kinds. Ends of a
    generation: generation_config.json names them, or else config.json. Raises ModelFileError, UnsupportedModelError.
    """
    folder = Path(folder)
    path = folder / TOKENIZER
    settings = _read_optional(folder / "special_tokens_map.json") | _read_optional(folder / "tokenizer_config.json")
    check_tokenizer(folder)
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises its own class for all that may be wrong
        reason = " ".join(str(error).split())[:200]
        raise ModelFileError(f"{path}: no tokenizer of the tokenizers library: {reason}; download it again") from None
    _add_tokens(backend, settings)
    bos, eos = (_id(backend, settings, name) for name in ("bos_token", "eos_token"))
    try:
        return FastTokenizer(
            backend,
            bos_id=bos,
            eos_id=eos,
            eos_ids=_read_ends(folder),
            chat_template=_read_template(folder, settings),
        )
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{path}: {error}") from None


def read_chat_template(folder: str | os.PathLike[str]) -> str | None:
    """The template that `read_folder_tokenizer` finds, without the tokenizer. Raises ModelFileError."""
    return _read_template(Path(folder), _read_optional(Path(folder) / "tokenizer_config.json"))


def _read_optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.exists() else {}


def _text(token: Any) -> str | None:
    """A token's text; files write it as text, or as an object that has it."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) and token else None


def _id(backend: tokenizers.Tokenizer, settings: Mapping[str, Any], name: str) -> int | None:
    text = _text(settings.get(name))
    return None if text is None else backend.token_to_id(text)


def _add_tokens(backend: tokenizers.Tokenizer, settings: Mapping[str, Any]) -> None:
    """Tokens that tokenizer_config.json has and tokenizer.json lacks, and control tokens by their names."""
    added = {token.content for token in backend.get_added_tokens_decoder().values()}
    listed = settings.get("added_tokens_decoder")
    for _, token in sorted((listed if isinstance(listed, dict) else {}).items(), key=lambda item: item[0].zfill(12)):
        if (text := _text(token)) is not None and text not in added and isinstance(token, dict):
            flags = {key: token[key] for key in ("lstrip", "rstrip", "normalized") if isinstance(token.get(key), bool)}
            backend.add_tokens([AddedToken(text, special=token.get("special") is True, **flags)])
            added.add(text)
    others = settings.get("extra_special_tokens") or settings.get("additional_special_tokens")
    others = others if isinstance(others, list) else []
    for text in map(_text, [*(settings.get(name) for name in _NAMED), *others]):
        if text is not None and text not in added:
            backend.add_special_tokens([AddedToken(text, special=True)])
            added.add(text)


def _read_ends(folder: Path) -> list[int]:
    """Ids that end a generation."""
    for path in (folder / "generation_config.json", folder / "config.json"):
        ends = _read_optional(path).get("eos_token_id")
        if ends is not None:
            return check_ends(ends, path)
    return []


def check_ends(ends: Any, where: Path | str) -> list[int]:
    """What settings call `eos_token_id`: an id, some, or none. Raises ModelFileError."""
    ids = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if not all(type(id) is int and 0 <= id < 2**31 for id in ids):
        raise ModelFileError(f"{where}: eos_token_id is no token id; download it again")
    return ids


def _read_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    """Of several templates the one called "default"."""
    own = folder / "chat_template.jinja"
    if own.exists():
        try:
            return own.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            raise ModelFileError(f"{own}: no readable text; download it again") from None
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None
