"""llama.cpp through the C functions that `llama-cpp-python` exports.

The package's own loop copies whole rows of logits and runs a chain of samplers for every token. Called directly,
nothing stands between two passes but an argmax.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding
from numpy.typing import NDArray

from foredraft.bench.peers import PeerSettings
from foredraft.bench.peers.greedy import GreedyPeer
from foredraft.errors import ForedraftError

BATCH = 512
#: What the package's manual advises for processors without a GPU.
LOOKUP_TOKENS = 2
#: Settings whose better value depends on machine and model: flash attention, and repacking weights at load.
CANDIDATES = tuple((flash, repack) for flash in (0, 1) for repack in (True, False))
TRIAL_PROMPT, TRIAL_TOKENS, NUM_TRIALS = 64, 8, 4


def make(name: str, settings: PeerSettings) -> GreedyPeer:
    logging.getLogger("llama-cpp-python").setLevel(logging.CRITICAL)  # stderr has the progress bar
    flash, repack = min(CANDIDATES, key=lambda candidate: try_out(settings, *candidate))
    lookup = LlamaPromptLookupDecoding(num_pred_tokens=LOOKUP_TOKENS)

    def propose(tokens: Sequence[int]) -> list[int]:
        found: list[int] = lookup(np.array(tokens, np.intc)).tolist()
        return found

    context = LlamaContext(settings, flash, repack)
    return GreedyPeer(
        name,
        context,
        settings.eos_ids,
        settings.meter,
        description=context.description,
        chunk=BATCH,
        propose=propose if name.endswith(":lookup") else None,
    )


class LlamaContext:
    """A model and its cache in llama.cpp; positions are counted here."""

    def __init__(self, settings: PeerSettings, flash: int, repack: bool) -> None:
        self.description = f"flash attention {'on' if flash else 'off'}, repacking {'on' if repack else 'off'}"
        of_model = llama_cpp.llama_model_default_params()
        of_model.use_extra_bufts = repack
        self._model: Any = llama_cpp.llama_model_load_from_file(str(settings.path).encode(), of_model)
        if not self._model:
            raise ForedraftError(f"llama.cpp cannot load {settings.path}")
        of_context = llama_cpp.llama_context_default_params()
        of_context.n_ctx = settings.max_model_len
        of_context.n_batch = of_context.n_ubatch = BATCH
        of_context.n_threads = of_context.n_threads_batch = settings.threads
        of_context.flash_attn_type = flash
        of_context.no_perf = True
        self._context: Any = llama_cpp.llama_init_from_model(self._model, of_context)
        if not self._context:
            raise ForedraftError(f"llama.cpp has no memory for a context of {settings.max_model_len} tokens")
        self._memory: Any = llama_cpp.llama_get_memory(self._context)
        self.vocab_size: int = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._batch = llama_cpp.llama_batch_init(BATCH, 0, 1)
        self._num_cached = 0

    def close(self) -> None:
        llama_cpp.llama_batch_free(self._batch)
        llama_cpp.llama_free(self._context)
        llama_cpp.llama_model_free(self._model)

    def cut(self, length: int) -> None:
        """Keep so many positions."""
        llama_cpp.llama_memory_seq_rm(self._memory, 0, length, -1)
        self._num_cached = length

    def forward(self, tokens: Sequence[int], num_logits: int = 1) -> list[int]:
        """One pass after the cached positions. Returns the likeliest token after each of the last `num_logits`."""
        batch = self._batch
        batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            batch.token[i] = token
            batch.pos[i] = self._num_cached + i
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = 0
            batch.logits[i] = i >= len(tokens) - num_logits
        status = llama_cpp.llama_decode(self._context, batch)
        if status != 0:
            raise ForedraftError(f"llama.cpp failed with status {status}: is the context large enough (-c)?")
        self._num_cached += len(tokens)
        return [int(self._logits(i).argmax()) for i in range(len(tokens) - num_logits, len(tokens))]

    def _logits(self, row: int) -> NDArray[np.float32]:
        pointer = llama_cpp.llama_get_logits_ith(self._context, row)
        return np.ctypeslib.as_array(pointer, shape=(self.vocab_size,))


def try_out(settings: PeerSettings, flash: int, repack: bool) -> float:
    """Seconds to decode some tokens in the best of several trials: others on the machine can only slow a trial down."""
    context = LlamaContext(settings, flash, repack)
    context.forward([(7919 * i) % context.vocab_size for i in range(TRIAL_PROMPT)])
    seconds = []
    for _ in range(NUM_TRIALS):
        context.cut(TRIAL_PROMPT)
        begin = settings.meter.read()
        for token in range(TRIAL_TOKENS):
            context.forward([token])
        seconds.append(settings.meter.between(begin, settings.meter.read()).wall_s)
    context.close()
    return min(seconds)
