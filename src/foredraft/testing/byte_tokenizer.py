"""A tokenizer whose tokens are the 256 bytes and a few special ones: every text is easy to read in a test."""

from __future__ import annotations

from collections.abc import Sequence

_SPECIALS = ("<bos>", "<eos>", "<pad>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>")


class ByteTokenizer:
    """0 .. 255 are bytes; BOS, EOS and the chat marks follow. The API of `foredraft.models.tokenizer.Tokenizer`."""

    BOS, EOS, PAD, USER, ASSISTANT, SYSTEM, END = range(256, 256 + len(_SPECIALS))

    chat_template = (
        "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )

    def __init__(self, *, add_bos: bool = False) -> None:
        self.vocab_size = 256 + len(_SPECIALS)
        self.bos_id: int | None = self.BOS
        self.eos_ids = frozenset({self.EOS, self.END})
        self._add_bos = add_bos

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        ids = [self.BOS] if add_special and self._add_bos else []
        while text:
            at, special = min(
                ((text.find(s), s) for s in _SPECIALS if parse_special and s in text), default=(len(text), "")
            )
            ids += text[:at].encode("utf-8", "surrogateescape")
            if special:
                ids.append(256 + _SPECIALS.index(special))
            text = text[at + len(special) :]
        return ids

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token adds to the text; a special token adds none."""
        return bytes([token]) if token < 256 else b""

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")

    def is_special(self, token: int) -> bool:
        return token >= 256
