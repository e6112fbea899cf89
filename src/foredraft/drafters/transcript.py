"""A sequence's text in the ids of a draft model of another tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile

from foredraft.algo.alignment import encode_after, num_settled
from foredraft.models.base import TextTokenizer
from foredraft.models.spelling import Speller

#: Tokens before the text's end that may still change, and how many of them are put up with where no word begins.
NUM_UNSETTLED, MAX_UNSETTLED = 8, 64
#: Bytes before a text that its tokens are chosen with.
LOOK_BEHIND = 32


class Transcript:
    """Follows a text that grows; its end is written anew each time, for what follows may change how it is cut.

        ids    [ settled: final ............. | tail ....... ]
        text   [ .............. look-behind ] [ tail ....... ]      never across a control token

    controls: the draft's ids for control tokens of the target; others are spelled as the letters they are, but for a
    begin-of-text token at the start, in whose place the draft's own stands.
    """

    def __init__(self, target: TextTokenizer, draft: Speller, controls: Mapping[int, int]) -> None:
        self._target, self._draft, self._controls = target, draft, controls
        bos_id = draft.tokenizer.bos_id
        opening = draft.tokenizer.encode("", add_special=True)[:1]
        self.ids = opening if opening == [bos_id] else []
        self.num_settled = len(self.ids)
        self._num_read = 0
        self._before = b""
        self._tail = b""
        self._begins = True  # nothing but control tokens is before the tail

    def follow(self, tokens: Sequence[int]) -> int:
        """Take in what was appended. Returns how many of the ids from before are still the same."""
        new = tokens[self._num_read :]
        if not new:
            return len(self.ids)
        old = self.ids[self.num_settled :]
        begin = self.num_settled
        for i, token in enumerate(new, self._num_read):
            if not self._target.is_special(token):
                self._tail += self._target.token_bytes(token)
            elif token in self._controls:
                self._write_tail()
                self._settle(len(self.ids))
                self._begin_after(self._controls[token])
            elif i > 0 or token != self._target.bos_id:
                self._tail += self._target.token_bytes(token)
        self._num_read = len(tokens)
        self._write_tail()
        changed = self.ids[begin : begin + len(old)]
        self._settle(
            self.num_settled
            + num_settled(self.ids[self.num_settled :], self._draft.tokenizer.token_bytes, NUM_UNSETTLED, MAX_UNSETTLED)
        )
        return begin + sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(old, changed, strict=False)))

    def _write_tail(self) -> None:
        del self.ids[self.num_settled :]
        self.ids += self._encode_tail() if self._tail else []

    def _encode_tail(self) -> list[int]:
        tokenizer = self._draft.tokenizer
        if self._begins:
            ids = tokenizer.encode(self._tail.decode(errors="replace"))  # with the blank that it may put before a text
            if b"".join(map(tokenizer.token_bytes, ids)).endswith(self._tail):
                return ids
        try:
            return encode_after(self._draft.encode, tokenizer.token_bytes, self._before, self._tail)
        except ValueError:  # a byte that the draft has no token for
            return tokenizer.encode(self._tail.decode(errors="replace"))

    def _settle(self, num_ids: int) -> None:
        """The first so many ids are final."""
        if num_ids == self.num_settled:
            return
        token_bytes = self._draft.tokenizer.token_bytes
        end = max(0, len(self._tail) - sum(len(token_bytes(id)) for id in self.ids[num_ids:]))
        self._before = (self._before + self._tail[:end])[-LOOK_BEHIND:]
        self._tail = self._tail[end:]
        self.num_settled = num_ids
        self._begins = False

    def _begin_after(self, control: int) -> None:
        if self.ids != [control]:  # else it opens the text already
            self.ids.append(control)
        self.num_settled = len(self.ids)
        self._before, self._tail = b"", b""
        self._begins = True
