"""Folders as `save_pretrained` writes them: a tiny model with a tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tokenizers
import transformers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.models.hf.zoo import make_model

TURN, END, BOS = "<|im_start|>", "<|im_end|>", "<s>"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_CORPUS = [
    "the cat sat on the mat, and the dog ran to the cat",
    "def add(a, b):\n    return a + b\n",
    "naïve café 日本語",
]


def byte_level(vocab_size: int = 300) -> Any:
    """BPE over bytes, with control tokens, a user-defined one, and no begin of text."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(_CORPUS, trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=END, additional_special_tokens=[TURN], pad_token="<|pad|>"
    )
    tokenizer.add_tokens(["<think>"])
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def sentencepiece() -> Any:
    """BPE in SentencePiece's manner: ▁ for blanks, bytes for what it does not know, a begin of text."""
    vocab = {text: id for id, text in enumerate(["<unk>", BOS, "</s>", *(f"<0x{byte:02X}>" for byte in range(256))])}
    for text in ["▁", *"thecasonmdrgu,.", "th", "the", "▁the", "at", "cat", "▁cat"]:
        vocab.setdefault(text, len(vocab))
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("a", "t"), ("c", "at"), ("▁", "cat")]
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 1)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=BOS, eos_token="</s>", unk_token="<unk>"
    )


def write_folder(
    path: Path,
    name: str = "llama",
    seed: int = 0,
    *,
    padding: int = 0,
    tokenizer: Any = None,
    settings: Mapping[str, Any] = MappingProxyType({}),
) -> Path:
    """A model and its tokenizer; its head has `padding` rows more than there are tokens. settings: of the model."""
    tokenizer = tokenizer or byte_level()
    own = {"vocab_size": len(tokenizer) + padding, "eos_token_id": tokenizer.eos_token_id}
    made = make_model(name, seed, **settings, **own)
    made.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path
