"""A draft model of another tokenizer than the target's.

Two ways, both lossless, and a request has one of them for good:

    text   the draft says what comes next in its own tokens, and its text is written anew in the target's: universal
           assisted generation, and string-level matching of Timor et al. (ICML 2025, arXiv 2502.05202). No tokens are
           out of reach. They are verified by the walk.
    tli    the draft's law is restricted to the tokens that both vocabularies have and renormalised: token-level
           intersection (the same paper). It keeps probabilities: ratio test, block verification, shared noise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from array_api_compat import to_device
from numpy.typing import NDArray

from foredraft.algo.alignment import (
    SharedVocabulary,
    encode_after,
    share_vocabularies,
    spread,
    to_target,
    whole_characters,
)
from foredraft.algo.sampler import Sampler, make_sampler
from foredraft.drafters.base import DraftNeeds, text_of
from foredraft.drafters.chains import Chain, ChainModel, ChainState, LawChain
from foredraft.drafters.transcript import LOOK_BEHIND, Transcript
from foredraft.models.base import LanguageModel, TextTokenizer
from foredraft.models.spelling import Speller
from foredraft.types import Array, Draft, DraftRequest, SamplingParams, SequenceView, Verdict

CrossVocab = Literal["auto", "text", "tli"]

#: Of a text's tokens in the draft's ids, how many the target must have too for `auto` to keep to them.
LEAST_SHARE = 0.5
#: Tokens that the draft may draw for one of the target's: one that says nothing could go on for ever.
MAX_DRAWN_PER_TOKEN = 6


class CrossVocabDrafter:
    """Drafts a chain with its own model and cache, many requests in one pass (`ChainModel`).

    mode: `auto` takes the text for greedy requests, and otherwise the law on the shared tokens where the request's
    text mostly consists of these. native: the C++ sampler reads the draft's rows.
    """

    needs = DraftNeeds(length=False)

    def __init__(
        self,
        name: str,
        model: LanguageModel,
        tokenizer: TextTokenizer,
        target: LanguageModel,
        target_tokenizer: TextTokenizer,
        *,
        mode: CrossVocab = "auto",
        enable_prefix_caching: bool = True,
        native: bool = True,
    ) -> None:
        self.name = name
        self._mode = mode
        self._draft, self._target = Speller(tokenizer), Speller(target_tokenizer)
        self._controls = _shared_controls(target_tokenizer, tokenizer)
        shared = share_vocabularies(self._target.ids, self._draft.ids, target.vocab_size, model.vocab_size)
        self._ids = _SharedIds(shared, target.vocab_size)
        self._picker = make_sampler(
            SamplingParams(temperature=0),
            vocab_size=model.vocab_size,
            vocab_limit=min(model.vocab_size, tokenizer.vocab_size),
            prompt=[],
            seed=0,
            kind="native" if native else "array",
        )
        self._chains = ChainModel(model, enable_prefix_caching=enable_prefix_caching)
        self._transcripts: dict[int, Transcript] = {}
        self._uses_law: dict[int, bool] = {}  # by sequence, once it has drafted

    def begin(self, seq: SequenceView) -> None:
        self._chains.begin(seq.id, seq.cache_salt)
        self._transcripts[seq.id] = Transcript(self._target.tokenizer, self._draft, self._controls)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        chains = [self._chain(request) for request in requests]
        self._chains.unroll(chains)
        return [chain.draft(self.name) for chain in chains]

    def observe(self, seq: SequenceView, draft: Draft, verdict: Verdict, hidden: Array | None) -> None:
        if draft.source == self.name:
            self._chains.state(seq.id).learn(len(draft.tokens), verdict.accepted)

    def end(self, seq: SequenceView) -> None:
        self._uses_law.pop(seq.id, None)
        transcript = self._transcripts.pop(seq.id, None)
        if transcript is not None:
            self._chains.end(seq.id, transcript.ids, transcript.num_settled)

    def check_integrity(self) -> None:
        """Raises ForedraftError if its cache miscounts a block's owners, or mistakes what it holds."""
        self._chains.check_integrity()

    def _chain(self, request: DraftRequest) -> Chain:
        seq = request.seq
        state, transcript = self._chains.state(seq.id), self._transcripts[seq.id]
        state.num_agreed = min(state.num_agreed, transcript.follow(text_of(seq)))
        state.follow(transcript.ids, transcript.num_settled)
        if seq.id not in self._uses_law:
            self._uses_law[seq.id] = self._prefers_law(seq.params, transcript.ids)
        if self._uses_law[seq.id]:
            return LawChain(request, state, transcript.ids, self._ids)
        return _TextChain(request, state, transcript.ids, self._draft.tokenizer, self._target, self._picker)

    def _prefers_law(self, params: SamplingParams, text: Sequence[int]) -> bool:
        if self._mode != "auto":
            return self._mode == "tli"
        return not params.is_greedy and self._ids.share_of(text) >= LEAST_SHARE


class _TextChain(Chain):
    """The draft's likeliest tokens, as text, in the tokens that the target would write it with."""

    def __init__(
        self,
        request: DraftRequest,
        state: ChainState,
        text: Sequence[int],
        tokenizer: TextTokenizer,
        target: Speller,
        picker: Sampler,
    ) -> None:
        super().__init__(request, state, text)
        self._tokenizer, self._target, self._picker = tokenizer, target, picker
        self._before = _end_of(request.seq.tokens, target.tokenizer)
        self._said = b""
        self._probabilities: list[float] = []  # of what was drawn
        self._lengths: list[int] = []  # and its bytes

    def draw(self, logits: Array) -> None:
        id, probability = self._picker.draw(_as_numpy(logits), (), None)
        text = b"" if self._tokenizer.is_special(id) else self._tokenizer.token_bytes(id)
        self.is_over = not text or len(self.drawn) + 1 >= MAX_DRAWN_PER_TOKEN * self.request.num_tokens
        if text:
            self.drawn.append(id)
            self._said += text
            self._probabilities.append(probability)
            self._lengths.append(len(text))
        self._write(is_complete=not text)

    def _write(self, is_complete: bool) -> None:
        """The draft anew: what was drawn last may have changed the tokens before it."""
        self.tokens, self.confidences, self.state.buckets = [], [], []
        self.reach, self.gain = 1.0, 0.0
        whole = len(self._said) - len(self._before + self._said) + whole_characters(self._before + self._said)
        token_bytes = self._target.tokenizer.token_bytes
        try:
            ids = encode_after(self._target.encode, token_bytes, self._before, self._said[: max(0, whole)])
        except ValueError:  # a byte that the target has no token for
            self.is_over = True
            return
        chances = spread(self._probabilities, self._lengths, [len(token_bytes(id)) for id in ids])
        for i, (id, chance) in enumerate(zip(ids[: self.request.num_tokens], chances, strict=False)):
            self.add(id, chance, is_open=i == len(ids) - 1 and not is_complete)


class _SharedIds:
    """The target's ids of texts that are tokens of both (see `LawChain`)."""

    def __init__(self, shared: SharedVocabulary, width: int) -> None:
        self.width = width
        self._shared = shared
        self._row = np.full(width, -np.inf, np.float32)
        self._own = dict(zip(shared.target_ids.tolist(), shared.draft_ids.tolist(), strict=True))
        self._is_shared = {*shared.draft_ids.tolist(), *shared.more_draft_ids.tolist()}

    def row(self, logits: Array) -> Array:
        to_target(_as_numpy(logits), self._shared, self._row)
        return self._row

    def own(self, token: int) -> int:
        own: int = self._own[token]
        return own

    def share_of(self, draft_ids: Sequence[int]) -> float:
        """Of these tokens of the draft, how many the target has too."""
        return sum(id in self._is_shared for id in draft_ids) / max(1, len(draft_ids))


def _shared_controls(target: TextTokenizer, draft: TextTokenizer) -> Mapping[int, int]:
    """Control tokens that both know by the same text, for what the draft reads: they are never proposed."""
    of_text = {draft.token_bytes(id): id for id in range(draft.vocab_size) if draft.is_special(id)}
    specials = (id for id in range(target.vocab_size) if target.is_special(id))
    return {id: of_text[text] for id in specials if (text := target.token_bytes(id)) in of_text}


def _as_numpy(row: Array) -> NDArray[np.float32]:
    """A row of the draft, which may be on a GPU, where texts and vocabularies are."""
    return np.asarray(to_device(row, "cpu"))


def _end_of(tokens: Sequence[int], tokenizer: TextTokenizer) -> bytes:
    """The last bytes of a text, not across a control token: whole tokens, LOOK_BEHIND bytes if there are."""
    text = b""
    for token in reversed(tokens):
        if tokenizer.is_special(token) or len(text) >= LOOK_BEHIND:
            break
        text = tokenizer.token_bytes(token) + text
    return text
