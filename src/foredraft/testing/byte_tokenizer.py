"""A tokenizer whose tokens are the 256 bytes and a few special ones: every text is easy to read in a test."""

from __future__ import annotations

from collections.abc import Sequence

_SPECIALS = ("<bos>", "<eos>", "<pad>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>")


class ByteTokenizer:
    """0 .. 255 are bytes; BOS, EOS and the chat marks follow. The API of `foredraft.models.tokenizer.Tokenizer`."""

    BOS, EOS, PAD, USER, ASSISTANT, SYSTEM, END = range(256, 256 + len(_SPECIALS))

    def __init__(self, *, add_bos: bool = False) -> None:
        self.vocab_size = 256 + len(_SPECIALS)
        self.max_token_length = max(map(len, _SPECIALS))
        self.add_bos = add_bos
        self.bos_id: int | None = self.BOS
        self.eos_id: int | None = self.EOS
        self.eos_ids = frozenset({self.EOS, self.END})
        self.chat_template: str | None = (
            "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
            "{% if add_generation_prompt %}<|assistant|>{% endif %}"
        )

    def encode(self, text: str, *, add_special: bool = False, parse_special: bool = False, mark: str = "") -> list[int]:
        ids = [self.BOS] if add_special and self.add_bos else []
        while text:
            found = ((text.find(special), special) for special in _SPECIALS if parse_special and special in text)
            at, special = min(found, default=(len(text), ""))
            piece = text[:at].replace(mark, "") if mark else text[:at]
            ids += piece.encode("utf-8", "replace")
            if special:
                ids.append(256 + _SPECIALS.index(special))
            text = text[at + len(special) :]
        return ids

    def mark_special(self, text: str, mark: str) -> str:
        for special in _SPECIALS:
            text = text.replace(special, special[:1] + mark + special[1:])
        return text

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        raw = b"".join(self.token_bytes(id) for id in ids if not (skip_special_tokens and self.is_special(id)))
        return raw.decode("utf-8", "replace")

    def token_bytes(self, id: int) -> bytes:
        """The bytes a token stands for; a special token's are its text."""
        if id < 256:
            return bytes([id])
        return _SPECIALS[id - 256].encode() if id < self.vocab_size else b""

    def is_special(self, id: int) -> bool:
        return 256 <= id < self.vocab_size

    def is_same_vocabulary(self, other: object) -> bool:
        return isinstance(other, ByteTokenizer)
