"""Calls of `foredraft.hf.generate` that the tests share, and a tokenizer of single letters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tokenizers
import transformers

import foredraft.hf
from tests.models.hf.zoo import EOS, PAD, VOCAB, draft

DRAFTERS = ("none", "ngram", "model", "ngram+model")


def drafter(spec: str, name: str = "llama") -> dict[str, Any]:
    """The arguments that choose it."""
    given: dict[str, Any] = {"num_assistant_tokens": 0 if spec == "none" else 4}
    if "ngram" in spec:
        given |= {"prompt_lookup_num_tokens": 4, "max_matching_ngram_size": 1}
    if "model" in spec:
        given["assistant_model"] = draft(name)
    return given


def ours(target: Any, spec: str = "ngram+model", **arguments: Any) -> Any:
    return foredraft.hf.generate(target, adaptive=False, **drafter(spec), **arguments)


def count_passes(target: Any, run: Callable[[], Any]) -> int:
    passes: list[int] = []
    hook = target.register_forward_hook(lambda *_: passes.append(1))
    run()
    hook.remove()
    return len(passes)


LETTERS = [chr(code) for code in (*range(0x21, 0x7F), 0xA1, 0xA2)]  # a token each


def letter_tokenizer(letters: int = VOCAB, order: int = 1) -> Any:
    vocab = {letter: i for i, letter in enumerate(LETTERS[:letters][::order])}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=LETTERS[PAD], eos_token=LETTERS[EOS]
    )
