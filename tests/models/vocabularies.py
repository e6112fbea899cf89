"""Small vocabularies for tests, as the fields of a GGUF file, and awkward texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from .gguf_bytes import BOOL, F32, I32, STRING, U32, array, entry, make_file

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

AWKWARD = [
    "",
    " ",
    "Hello world",
    "x =  1",
    "a  2024",
    "\n    1 x",
    "🙂👩\u200d👩\u200d👧\u200d👦 é e\u0301 🇩🇪 \U0001d518\U0001d52b",  # joined, composed and not, beyond the BMP
    "日本語テキスト 中文字符 한국어 ไทย עברית العربية हिन्दी",
    "1234567890 12 3.14159 1,000,000 ½ ² Ⅷ ١٢٣ १२",
    "   leading blanks and trailing   ",
    "\t\ttabs\t x",
    "CRLF\r\nline\r\n\r\n  x\r",
    " " * 3 + "x" + " " * 30 + "y",
    " " * 1000,
    "\n" * 50 + "\t" * 40,
    "it's I'LL don't 'S we've'd",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa!!!!!!!!!!!!!!!!!???",
    "\x00\x01\x7f\x80\xa0\u200b\u2028\u3000\ufeff\ufffdx",
    "def f(x):\n\treturn x  # comment\n\n\n",
    "http://a.b/c?d=e&f=%20#g <div class='x'></div>",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "<|endoftext|><|im_end|> <|im_end| <|<|im_end|>|>",
    '<tool_call>\n{"a": 1}\n</tool_call> <tool_response>',
    "<bos><start_of_turn>user\nhi<end_of_turn>\n<eos><unk><pad><unused5>",
    "[PAD151700] <0x41> [multimodal]",
]


def byte_level_fields(pre: str = "gpt-2", vocab_size: int = 1200) -> dict[str, Any]:
    """Byte-level, with merges across every word boundary, so that only the pre-tokenizer keeps words apart."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    corpus = [text.replace("_", " ") for text in AWKWARD]  # so that no special token is also a merged one
    backend.train_from_iterator([text for text in corpus for _ in range(3)], trainer)
    vocab = backend.get_vocab()
    tokens = [*sorted(vocab, key=vocab.__getitem__), "<|im_start|>", "<|im_end|>", "<tool_call>", "[PAD]"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [NORMAL] * len(vocab) + [CONTROL, CONTROL, USER_DEFINED, UNUSED],
        "tokenizer.ggml.merges": _merges(backend),
        "tokenizer.ggml.bos_token_id": len(vocab),
        "tokenizer.ggml.eos_token_id": len(vocab) + 1,
    }


def sentencepiece_fields(**settings: bool) -> dict[str, Any]:
    """A vocabulary with scores, byte fallback and a few special tokens."""
    pieces = [
        "▁",
        "▁▁",
        "h",
        "e",
        "l",
        "o",
        "w",
        "r",
        "d",
        "he",
        "ll",
        "llo",
        "hello",
        "▁w",
        "or",
        "▁wor",
        "▁world",
        "ld",
    ]
    tokens = ["<unk>", "<s>", "</s>", "<tag>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [UNKNOWN, CONTROL, CONTROL, USER_DEFINED, *[BYTE] * 256, *[NORMAL] * len(pieces)],
        "tokenizer.ggml.scores": [0.0] * 260 + [-float(i) for i in range(len(pieces))],
        **{"tokenizer.ggml." + name: value for name, value in settings.items()},
    }


def save_vocabulary(path: Path, fields: dict[str, Any]) -> Path:
    kinds = {str: STRING, float: F32, bool: BOOL, int: U32}
    entries = [entry("general.architecture", STRING, "llama")]
    for key, value in fields.items():
        if isinstance(value, list):
            kind = {str: STRING, float: F32, int: I32}[type(value[0])]
            entries.append(array(key, kind, value))
        else:
            entries.append(entry(key, kinds[type(value)], value))
    path.write_bytes(make_file(entries))
    return path


def _merges(backend: tokenizers.Tokenizer) -> list[str]:
    return [" ".join(merge) for merge in json.loads(backend.to_str())["model"]["merges"]]
