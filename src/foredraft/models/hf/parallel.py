"""A model of Transformers over several processes, by the library's own tensor-parallel plan."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import finalize

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.distributed.tensor_parallel import get_kv_heads_per_rank

from foredraft.errors import ForedraftError, ParameterError, UnsupportedModelError
from foredraft.models.base import DeviceRows, ImageReader, Rows, TextTokenizer
from foredraft.models.hf.follower import Call, Load
from foredraft.models.hf.load import HFOptions, load_hf_model, read_config
from foredraft.models.hf.model import HFModel
from foredraft.models.hf.processor import NoImages
from foredraft.models.hf.ranks import Ranks
from foredraft.types import Array, Picture


class ParallelModel:
    """A model whose weights and cache are shared out over ranks. Implements LanguageModel; see there for the methods.

    Every pass is run by all ranks on the same rows; the logits are whole on each, and this one's are returned. A lost
    rank raises EngineFailedError, in the pass that it is missing from.
    """

    device_rows: DeviceRows | None

    def __init__(self, ranks: Ranks, number: int, own: HFModel) -> None:
        self.name = own.name
        self.vocab_size = own.vocab_size
        self.max_model_len = own.max_model_len
        self.context_length = own.context_length
        self.num_blocks = own.num_blocks
        self.weight_bytes = own.weight_bytes
        self.device_rows = own.device_rows
        self.can_see = own.can_see
        self.takes_trees = own.takes_trees
        self._ranks = ranks
        self._number = number
        self._own = own
        self._leave = finalize(self, ranks.drop, number)

    def forward(self, batch: Sequence[Rows], hidden_layers: Sequence[int] = ()) -> Array:
        return self._together("forward", list(batch), tuple(hidden_layers))

    def hidden_states(self) -> Array:
        return self._own.hidden_states()

    def move_slots(self, block_table: NDArray[np.int32], source: Sequence[int], target: Sequence[int]) -> None:
        self._together("move_slots", block_table, list(source), list(target))

    def see(self, picture: Picture) -> None:
        raise ForedraftError(f"{self.name} reads no images over several processes")

    def limit_head(self, token_ids: Sequence[int] | NDArray[np.int64] | None) -> None:
        """All logits are computed all the same: every rank has a part of the head."""

    def close(self) -> None:
        """Free it on all ranks. The other processes end with their last model."""
        self._leave()

    def _together(self, method: str, *arguments: Any) -> Any:
        if not self._leave.alive:
            raise ForedraftError(f"{self.name} was closed")
        call = Call(self._number, method, arguments)
        return self._ranks.together(call, lambda call: getattr(self._own, method)(*call.arguments))


def load_parallel_model(name: str, options: HFOptions, size: int, **settings: Any) -> ParallelModel:
    """Load a model on `size` processes: this one, and others that are started unless they run already.

    settings: those of `load_hf_model`. Raises ParameterError, UnsupportedModelError, ModelFileError, EngineFailedError.
    """
    _check_machine(size, options)
    check_plan(read_config(name, options), size, Path(name).name)
    ranks = Ranks.of_this_process(size)
    threads = max(1, (options.threads or ranks.num_threads) // size)
    options = replace(options, device=None, enforce_eager=True, threads=threads)  # exchanges stay out of CUDA graphs
    settings = {**settings, "tensor_parallel_size": size}
    number, own = ranks.load(
        lambda number: Load(number, name, options, settings),
        lambda told: load_hf_model(told.name, told.options, **told.settings),
    )
    return ParallelModel(ranks, number, own)


def refuse_images(model: ParallelModel, tokenizer: TextTokenizer) -> ImageReader | None:
    """None: it is a model of text."""
    if not model.can_see:
        return None
    return NoImages("this model takes none here: over several processes only texts are read", tokenizer)


def check_plan(config: Any, size: int, name: str) -> None:
    """Raises UnsupportedModelError or ParameterError if the library's plan does not share a model out among so many."""
    text = config.get_text_config(decoder=True)
    plan = text.base_model_tp_plan or {}
    if not any("*" in rule for rule in plan):  # in layers
        raise UnsupportedModelError(
            f"{name} cannot be shared out: Transformers has no tensor-parallel plan for the layers of "
            f"{text.model_type}; leave tensor_parallel_size out"
        )
    num_heads = text.num_attention_heads
    num_kv_heads = getattr(text, "num_key_value_heads", None) or num_heads
    if any(get_kv_heads_per_rank(plan, heads, size) is None for heads in (num_heads, num_kv_heads)):
        common = math.gcd(num_heads, num_kv_heads)
        sizes = [str(n) for n in range(1, common + 1) if common % n == 0]
        raise ParameterError(
            "tensor_parallel_size",
            f"of {size} does not divide the heads of {name} ({num_heads}, and {num_kv_heads} of keys and values): "
            f"take {' or '.join(sizes)}",
        )


def _check_machine(size: int, options: HFOptions) -> None:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    kind = "cpu" if accelerator is None else accelerator.type
    if kind not in ("cpu", "cuda"):
        raise ParameterError(
            "tensor_parallel_size", f"above 1 runs on CUDA devices and CPUs, and this machine has {kind}"
        )
    if kind == "cuda" and torch.cuda.device_count() < size:
        raise ParameterError(
            "tensor_parallel_size", f"of {size} needs as many GPUs, and there are {torch.cuda.device_count()}"
        )
    if options.device_map is not None or options.device not in (None, kind):
        given = "device" if options.device_map is None else "device_map"
        raise ParameterError(
            given,
            "does not go with tensor_parallel_size: rank i takes GPU i (CUDA_VISIBLE_DEVICES chooses and hides them)",
        )
    if os.environ.get("LOCAL_RANK", "0") != "0":
        raise ForedraftError("this is a process of torchrun's, and tensor_parallel_size starts its own: run it without")
