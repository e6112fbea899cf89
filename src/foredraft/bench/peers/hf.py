"""Transformers on the same GGUF file, which it unpacks to bfloat16."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transformers
from transformers.generation.streamers import BaseStreamer

from foredraft.bench.figures import Run
from foredraft.bench.machine import Meter, Reading
from foredraft.bench.peers import PeerSettings

#: An order of magnitude slower than the others: a few prompts tell enough.
MAX_NUM_PROMPTS = 2
LOOKUP_TOKENS = 10


def make(name: str, settings: PeerSettings) -> Transformers:
    logging: Any = transformers.utils.logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(settings.threads)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        str(settings.path.parent), gguf_file=settings.path.name, dtype=torch.bfloat16
    )
    return Transformers(name, model.eval(), settings)


class FirstToken(BaseStreamer):
    """Reads the meter when the first tokens after the prompt arrive."""

    def __init__(self, meter: Meter) -> None:
        self.reading: Reading | None = None
        self.num_tokens = 0
        self._meter = meter
        self._seen_prompt = False

    def put(self, value: torch.Tensor) -> None:
        if not self._seen_prompt:
            self._seen_prompt = True
        elif self.reading is None:
            self.num_tokens = value.numel()
            self.reading = self._meter.read()

    def end(self) -> None: ...


class Transformers:
    """`generate` as an engine of the benchmark, plain or with its prompt lookup."""

    max_num_prompts = MAX_NUM_PROMPTS
    description = "bfloat16"

    def __init__(self, name: str, model: Any, settings: PeerSettings) -> None:
        self.name = name
        self._model = model
        self._eos_ids = sorted(settings.eos_ids)
        self._meter = settings.meter
        self._lookup_tokens = LOOKUP_TOKENS if name.endswith(":lookup") else None

    def run(self, prompt: Sequence[int], max_tokens: int) -> Run:
        ids = torch.tensor([list(prompt)])
        streamer = FirstToken(self._meter)
        begin = self._meter.read()
        output = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_tokens,
            eos_token_id=self._eos_ids,
            pad_token_id=self._eos_ids[0],
            prompt_lookup_num_tokens=self._lookup_tokens,
            streamer=streamer,
        )
        end = self._meter.read()
        first = streamer.reading or end
        return Run(
            token_ids=tuple(output[0, len(prompt) :].tolist()),
            text="",
            num_prompt_tokens=len(prompt),
            num_first=streamer.num_tokens,
            prefill=self._meter.between(begin, first),
            decode=self._meter.between(first, end),
        )
