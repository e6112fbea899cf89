"""Tokenizers of Transformers as the engine wants them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tokenizers

from foredraft.errors import UnsupportedModelError
from foredraft.models.fast_tokenizer import FastTokenizer


def make_tokenizer(tokenizer: Any, eos_ids: Iterable[int] = ()) -> FastTokenizer:
    """A fast tokenizer of Transformers, whose ids of a text are those of `tokenizer(text)`.

    eos_ids: what ends a generation by the model's own settings, beside the tokenizer's end-of-text token. Raises
    UnsupportedModelError for tokenizers without a fast implementation, and as FastTokenizer does.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise UnsupportedModelError(
            f"{type(tokenizer).__name__} has no fast implementation: convert it with transformers' "
            "convert_slow_tokenizer"
        )
    template = tokenizer.chat_template
    return FastTokenizer(
        backend,
        bos_id=tokenizer.bos_token_id,
        eos_id=tokenizer.eos_token_id,
        eos_ids=eos_ids,
        chat_template=template.get("default") if isinstance(template, dict) else template,
    )
