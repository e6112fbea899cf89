"""Ids to text, as a stream: whole UTF-8 characters only, and nothing that may yet turn into a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from foredraft.models.base import TextTokenizer


class Detokenizer:
    """Feed ids one at a time; `take` what may be shown. Special tokens give no text; broken UTF-8 gives U+FFFD.

    text:  [ taken ][ may be shown ][ held: a proper prefix of some stop string ][ bytes of an unfinished character ]
    """

    def __init__(self, tokenizer: TextTokenizer, stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._text = ""
        self._num_taken = 0

    def feed(self, token_id: int, *, may_stop: bool = True) -> bool:
        """True when this token completed a stop string, if it may; the text then ends before it."""
        if self._tokenizer.is_special(token_id):
            return False
        scanned = len(self._text)
        self._text += self._decoder.decode(self._tokenizer.token_bytes(token_id))
        return may_stop and self._cut_at_stop(scanned)

    def finish(self) -> bool:
        """No more ids: an unfinished character becomes U+FFFD and held text is let go. True as in `feed`."""
        scanned = len(self._text)
        self._text += self._decoder.decode(b"", final=True)
        return self._cut_at_stop(scanned)

    def take(self, *, final: bool = False) -> str:
        """Text not taken before. `final`: also what was held back."""
        end = len(self._text) - (0 if final else self._num_held())
        new = self._text[self._num_taken : end]
        self._num_taken = max(self._num_taken, end)
        return new

    @property
    def text(self) -> str:
        return self._text

    def _cut_at_stop(self, scanned: int) -> bool:
        # A stop string completed now ends in the new text, so it begins less than its own length before it.
        hits = [self._text.find(s, max(0, scanned - len(s) + 1)) for s in self._stop]
        found = [hit for hit in hits if hit >= 0]
        if found:
            self._text = self._text[: min(found)]
        return bool(found)

    def _num_held(self) -> int:
        longest = max(map(len, self._stop), default=0)
        for n in range(min(longest - 1, len(self._text)), 0, -1):
            if any(s.startswith(self._text[-n:]) for s in self._stop):
                return n
        return 0
