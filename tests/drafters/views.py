"""A sequence as drafters see it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from foredraft.types import Picture, SamplingParams, TokenGrammar


@dataclass
class View:
    tokens: list[int]
    id: int = 0
    num_prompt_tokens: int = 0
    params: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0))
    prediction: tuple[int, ...] = ()
    sampler: Any = None
    cache_salt: str = ""
    grammar: TokenGrammar | None = None
    pictures: tuple[Picture, ...] = ()
