"""`--speculative-config`: vLLM's JSON, as far as its meaning is the same here."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from foredraft.errors import ParameterError
from foredraft.types import MAX_DRAFT, MAX_THREADS

FLAG = "--speculative-config"
METHODS = ("ngram", "draft_model")
QUANTIZATIONS = ("auto", "q4", "q8", "none")
REJECTION_SAMPLE_METHODS = ("standard", "block")
CROSS_VOCABS = ("auto", "text", "tli", "off")


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """vLLM's keys, checked. None: not given."""

    method: str
    model: str | None = None
    num_speculative_tokens: int | None = None
    prompt_lookup_max: int | None = None
    prompt_lookup_min: int | None = None
    rejection_sample_method: str | None = None
    quantization: str | None = None
    use_heterogeneous_vocab: bool | None = None
    draft_tensor_parallel_size: int | None = None

    @property
    def cross_vocab(self) -> str | None:
        """The same choice in the words of `--cross-vocab`: vLLM drafts on the shared tokens, or not at all."""
        if self.use_heterogeneous_vocab is None:
            return None
        return "tli" if self.use_heterogeneous_vocab else "off"

    @property
    def drafter(self) -> str:
        """The same choice in the words of `-d`."""
        return f"model:{self.model}" if self.method == "draft_model" else self.method


def parse_speculative_config(text: str) -> SpeculativeConfig:
    """Raises ParameterError for anything but an object of known keys with sensible values."""
    try:
        given = json.loads(text)
    except json.JSONDecodeError as error:
        raise ParameterError(FLAG, f"is not JSON: {error.msg} at character {error.pos}") from error
    except (RecursionError, ValueError) as error:
        raise ParameterError(FLAG, "is nested too deeply, or has a number with too many digits") from error
    if not isinstance(given, dict):
        raise ParameterError(FLAG, 'must be a JSON object such as {"method": "ngram", "num_speculative_tokens": 5}')
    for key in given:
        if key not in _CHECKS:
            close = difflib.get_close_matches(key, _CHECKS, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known keys: {', '.join(_CHECKS)}"
            raise ParameterError(FLAG, f"has an unknown key {key!r}; {hint}")
    values = {key: _CHECKS[key](key, value) for key, value in given.items() if value is not None}
    return _consistent(values)


def _consistent(values: Mapping[str, Any]) -> SpeculativeConfig:
    method = values.get("method", "draft_model" if "model" in values else "ngram")
    if method == "draft_model" and "model" not in values:
        raise ParameterError(FLAG, "with method 'draft_model' needs 'model', the draft")
    if method == "ngram" and "model" in values:
        raise ParameterError(FLAG, "with method 'ngram' takes no 'model'")
    lookup = [key for key in ("prompt_lookup_min", "prompt_lookup_max") if key in values]
    if method != "ngram" and lookup:
        raise ParameterError(FLAG, f"takes {lookup[0]!r} with method 'ngram' only")
    config = SpeculativeConfig(**{**values, "method": method})
    low, high = config.prompt_lookup_min, config.prompt_lookup_max
    if low is not None and high is not None and low > high:
        raise ParameterError(FLAG, "has a 'prompt_lookup_min' above its 'prompt_lookup_max'")
    return config


def _text(key: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ParameterError(FLAG, f"needs a string for {key!r}")
    return value


def _one_of(choices: tuple[str, ...]) -> Callable[[str, object], str]:
    def check(key: str, value: object) -> str:
        if value not in choices:
            raise ParameterError(FLAG, f"has {value!r} for {key!r}; choose one of: {', '.join(choices)}")
        return str(value)

    return check


def _switch(key: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise ParameterError(FLAG, f"needs true or false for {key!r}")
    return value


def _count(low: int, high: int) -> Callable[[str, object], int]:
    def check(key: str, value: object) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise ParameterError(FLAG, f"needs a whole number from {low} to {high} for {key!r}")
        return value

    return check


_CHECKS: Mapping[str, Callable[[str, object], Any]] = {
    "method": _one_of(METHODS),
    "model": _text,
    "num_speculative_tokens": _count(0, MAX_DRAFT),
    "prompt_lookup_max": _count(1, MAX_DRAFT),
    "prompt_lookup_min": _count(1, MAX_DRAFT),
    "rejection_sample_method": _one_of(REJECTION_SAMPLE_METHODS),
    "quantization": _one_of(QUANTIZATIONS),
    "use_heterogeneous_vocab": _switch,
    "draft_tensor_parallel_size": _count(1, MAX_THREADS),
}
