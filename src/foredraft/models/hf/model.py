"""Any Transformers causal language model as a LanguageModel."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cached_property, partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray

from foredraft.algo.sampler import SamplerKind
from foredraft.errors import ForedraftError, ParameterError, UnsupportedModelError
from foredraft.models.base import BLOCK_SIZE, DeviceRows, Rows
from foredraft.models.hf.cache import SlotCache
from foredraft.models.hf.checks import cache_argument, check_kind, context_length, text_config
from foredraft.models.hf.encodings import Encodings
from foredraft.models.hf.graphs import Capture, StaticPasses
from foredraft.models.hf.head import CutHead, find_body
from foredraft.models.hf.layout import Layout, least_shape, make_layout, running
from foredraft.models.hf.masks import install_masks
from foredraft.models.hf.packing import PackedLayers
from foredraft.models.hf.vision import Features, can_see, read_picture, spread_positions
from foredraft.types import MAX_DRAFT, Array, Picture

#: Sequences with no more rows run together, filled up to the longest; one with more (a prompt) runs by itself.
MAX_ROWS_TOGETHER = MAX_DRAFT + 1


class HFModel:
    """Runs a Transformers model on a paged cache. Implements LanguageModel; see there for the methods.

    model: in evaluation mode, on its device or spread over several; never changed. max_model_len: None takes what its
    positions reach. fixed_rows: passes of fewer rows a sequence are filled up to so many, so that plain and speculative
    decoding run the same kernels on the same shapes; 0 does not fill up. device_sampler: what reads the rows as tensors
    on the model's device; None brings them to the CPU as numpy arrays. They are float32 either way. packed: run linear
    layers on the CPU over a second copy of their weights (packing.py). capture: short passes are captured by it and
    replayed, after the first `num_uncaptured` (graphs.py); the cache then takes its whole memory at once.

    Raises UnsupportedModelError if the model cannot be run exactly: its state cannot be undone, or it takes no masks.
    """

    def __init__(
        self,
        model: Any,
        *,
        name: str,
        num_blocks: int,
        max_model_len: int | None = None,
        fixed_rows: int = 0,
        device_sampler: SamplerKind | None = None,
        packed: bool = False,
        capture: Capture | None = None,
        num_uncaptured: int = 0,
    ) -> None:
        check_kind(model, name)
        install_masks()
        self.name = name
        self.num_blocks = num_blocks
        self.context_length = context_length(model) or num_blocks * BLOCK_SIZE
        self.max_model_len = self.context_length if max_model_len is None else max_model_len
        if not 1 <= self.max_model_len <= self.context_length:
            raise ParameterError("max_model_len", f"must lie between 1 and the context of {self.context_length} tokens")
        config = text_config(model)
        head = model.get_output_embeddings()
        weight = getattr(head, "weight", None)  # a quantised head may have it packed away
        self.vocab_size: int = weight.shape[0] if isinstance(weight, torch.Tensor) else config.vocab_size
        self.transformers_model = model
        self._cache = SlotCache(config.num_hidden_layers, 0 if capture is None else num_blocks + 1)
        self._cache_argument = cache_argument(model)
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._device = model.get_input_embeddings().weight.device
        self.fixed_rows = fixed_rows
        self.device_rows = None if device_sampler is None else DeviceRows(str(self._device), device_sampler)
        self._hidden: torch.Tensor | None = None
        self._features: WeakKeyDictionary[Picture, Features] = WeakKeyDictionary()  # as long as their requests live
        self._encodings = Encodings()  # of pictures that may come again
        self._cut_head: CutHead | None = None
        self._packed = PackedLayers(model) if packed else None
        self._static: StaticPasses | None = None
        if capture is not None:
            self._static = StaticPasses(
                partial(_run_static, self._body or model, {self._cache_argument: self._cache, "use_cache": True}),
                capture,
                name=name,
                device=self._device,
                scratch=num_blocks,
                fixed_rows=fixed_rows,
                num_uncaptured=num_uncaptured,
            )

    @property
    def is_packed(self) -> bool:
        return self._packed is not None

    @property
    def takes_trees(self) -> bool:
        """Attention sums slot by slot, and the ancestors of a tree's row do not lie in those of a chain."""
        return not self.fixed_rows

    @property
    def can_see(self) -> bool:
        """Whether it takes rows with pictures; `probe_pictures` tells whether it takes them exactly."""
        return can_see(self.transformers_model)

    @property
    def weight_bytes(self) -> int:
        return sum(p.numel() * p.element_size() for p in self.transformers_model.parameters())

    @torch.no_grad()
    def forward(self, batch: Sequence[Rows], hidden_layers: Sequence[int] = ()) -> Array:
        logits: list[torch.Tensor] = [torch.empty(0)] * len(batch)
        hidden: list[torch.Tensor] = [torch.empty(0)] * len(batch)
        for group in _groups(batch):
            members = [batch[i] for i in group]
            group_logits, group_hidden = self._replay(members, hidden_layers) or self._run(members, hidden_layers)
            for i, own_logits, own_hidden in zip(group, group_logits, group_hidden, strict=True):
                logits[i], hidden[i] = own_logits, own_hidden
        self._hidden = torch.cat(hidden, dim=1) if hidden_layers else None
        return self._finish(torch.cat(logits))

    def hidden_states(self) -> Array:
        if self._hidden is None:
            raise ValueError("the last pass was asked for no hidden states")
        return self._hidden.cpu().numpy() if self.device_rows is None else self._hidden

    @torch.no_grad()
    def move_slots(self, block_table: NDArray[np.int32], source: Sequence[int], target: Sequence[int]) -> None:
        def physical(slots: Sequence[int]) -> list[int]:
            return [int(block_table[slot // BLOCK_SIZE]) * BLOCK_SIZE + slot % BLOCK_SIZE for slot in slots]

        self._cache.move_slots(physical(source), physical(target))

    def see(self, picture: Picture) -> None:
        if picture in self._features:
            return
        known = self._encodings.find(picture.key)
        if known is not None:
            self._features[picture] = known
            return
        try:
            features = read_picture(self.transformers_model, picture, self.name)
        except ForedraftError:
            raise
        except Exception as error:  # a fault of one picture must not be one of the pass
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise ForedraftError(f"{self.name} could not read an image: {reason}") from None
        self._features[picture] = features
        self._encodings.keep(picture.key, features)

    def limit_head(self, token_ids: Sequence[int] | NDArray[np.int64] | None) -> None:
        """Where more than a matrix product makes the logits, all of them are computed all the same."""
        if token_ids is None:
            self._cut_head = None
            return
        if self._body is not None:
            head = self.transformers_model.get_output_embeddings()
            self._cut_head = CutHead(head, token_ids, packed=self.is_packed, previous=self._cut_head)

    @property
    def replays(self) -> bool:
        """Whether short passes are captured, or will be."""
        return self._static is not None

    @torch.no_grad()
    def capture_usual(self) -> None:
        """Capture what most requests need, before the first pass. If that fails, the cache grows as needed."""
        if self._static is None:
            return
        self._static.capture_usual(-(-self.max_model_len // BLOCK_SIZE))
        if not self._static.num_captured:
            self._static, self._cache = None, SlotCache(len(self._cache.layers))

    @cached_property
    def _body(self) -> Any:
        """The model without its head, if it can be run so."""
        return find_body(self.transformers_model)

    def _replay(
        self, batch: Sequence[Rows], hidden_layers: Sequence[int]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]] | None:
        """As `_run`, by a captured pass; None if there is none for such rows."""
        has_more = any(rows.embeddings is not None or _reached(rows) for rows in batch)
        output = None
        if self._static is not None and not has_more and not hidden_layers:
            output = self._static.run(batch)
        if output is None:
            return None
        ends = [len(rows.tokens) for rows in batch]
        wanted = [slice(end - rows.num_logits, end) for end, rows in zip(ends, batch, strict=True)]
        if self._body is None:
            logits = [output[b, own] for b, own in enumerate(wanted)]
        else:
            logits = self._apply_head(output, wanted)
        return logits, [torch.empty(0)] * len(batch)

    def _apply_head(self, states: torch.Tensor, wanted: Sequence[slice]) -> list[torch.Tensor]:
        head = self._cut_head or self.transformers_model.get_output_embeddings()
        if states.shape[1] == self.fixed_rows:  # the head, too, runs over one number of rows
            logits = head(states)
            return [logits[b, own] for b, own in enumerate(wanted)]
        own_states = [states[b, own] for b, own in enumerate(wanted)]
        return list(head(torch.cat(own_states)).split([len(own) for own in own_states]))

    def _run(
        self, batch: Sequence[Rows], hidden_layers: Sequence[int]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Each sequence's logits [num_logits, vocab] and hidden states [layers, rows, hidden]."""
        layout = make_layout(batch, self._device, least_shape(batch, self.fixed_rows))
        wanted = [list(range(len(rows.tokens) - rows.num_logits, len(rows.tokens))) for rows in batch]
        kept = sorted({i for own in wanted for i in own})
        if layout.num_queries == self.fixed_rows:  # the head, too, runs over one number of rows
            kept = list(range(layout.num_queries))
        inputs: dict[str, Any] = {"position_ids": self._positions(batch, layout), self._cache_argument: self._cache}
        if all(rows.embeddings is None and not _shown(rows) for rows in batch):
            inputs["input_ids"] = layout.tokens
        else:
            inputs["inputs_embeds"] = self._embed(batch, layout)
        if self._keeps_logits and self._cut_head is None:
            inputs["logits_to_keep"] = torch.tensor(kept or [0], device=self._device)
        with ExitStack() as hooks, running(layout):
            if self._packed is not None:
                hooks.enter_context(self._packed.running())
            seen = _watch_layers(hooks, self.transformers_model, hidden_layers)
            run = self.transformers_model if self._cut_head is None else self._body
            output = run(**inputs, use_cache=True, return_dict=True)
        if self._cut_head is not None:
            states = output.last_hidden_state
            logits = [self._cut_head(states[b, own]) for b, own in enumerate(wanted)]
        else:
            of_index = {index: k if self._keeps_logits else index for k, index in enumerate(kept)}
            logits = [output.logits[b, [of_index[i] for i in own]] for b, own in enumerate(wanted)]
        if not hidden_layers:
            return logits, [torch.empty(0)] * len(batch)
        stacked = torch.stack(
            [seen[layer].to(self._device) for layer in hidden_layers]
        ).float()  # [layers, B, Q, hidden]
        return logits, [stacked[:, b, : len(rows.tokens)] for b, rows in enumerate(batch)]

    def _embed(self, batch: Sequence[Rows], layout: Layout) -> torch.Tensor:
        embedded: torch.Tensor = self.transformers_model.get_input_embeddings()(layout.tokens).clone()
        for b, rows in enumerate(batch):
            if rows.embeddings is not None:
                given = torch.as_tensor(rows.embeddings, device=embedded.device)
                embedded[b, : len(rows.tokens)] = given.to(embedded.dtype)
            for picture in _shown(rows):
                begin, end = max(picture.start, rows.start), min(picture.end, rows.start + len(rows.tokens))
                seen = self._features[picture].embeddings[begin - picture.start : end - picture.start]
                embedded[b, begin - rows.start : end - rows.start] = seen.to(embedded.device, embedded.dtype)
        return embedded

    def _positions(self, batch: Sequence[Rows], layout: Layout) -> torch.Tensor:
        """[B, Q]; or [dimensions, B, Q], if a picture of the batch stands in more of them than one."""
        reached = [_reached(rows) for rows in batch]
        if all(self._features[picture].positions is None for pictures in reached for picture in pictures):
            return layout.positions
        logical = layout.positions.cpu().numpy()
        spread = [
            spread_positions(logical[b], pictures, [self._features[picture] for picture in pictures])
            for b, pictures in enumerate(reached)
        ]
        num_dimensions = max(positions.shape[0] for positions in spread if positions is not None)
        both = [
            np.broadcast_to(logical[b], (num_dimensions, layout.num_queries)) if positions is None else positions
            for b, positions in enumerate(spread)
        ]
        return torch.from_numpy(np.stack(both, axis=1)).to(self._device)

    def _finish(self, logits: torch.Tensor) -> Array:
        logits = logits.float()
        return logits.cpu().numpy() if self.device_rows is None else logits


def _run_static(model: Any, cache: dict[str, Any], layout: Layout) -> torch.Tensor:
    """Logits [B, Q, vocab], or of a model without its head the last states [B, Q, hidden]."""
    with running(layout):
        output = model(input_ids=layout.tokens, position_ids=layout.positions, return_dict=True, **cache)
    first: torch.Tensor = output["logits"] if "logits" in output else output["last_hidden_state"]
    return first


def _groups(batch: Sequence[Rows]) -> list[list[int]]:
    """Which sequences run together."""
    together = [i for i, rows in enumerate(batch) if len(rows.tokens) <= MAX_ROWS_TOGETHER]
    alone = [[i] for i, rows in enumerate(batch) if len(rows.tokens) > MAX_ROWS_TOGETHER]
    return [together, *alone] if together else alone


def _reached(rows: Rows) -> list[Picture]:
    """The pictures before the end of these rows."""
    return [picture for picture in rows.pictures if picture.start < rows.start + len(rows.tokens)]


def _shown(rows: Rows) -> list[Picture]:
    """The pictures that some of these very rows stand for."""
    return [picture for picture in _reached(rows) if picture.end > rows.start]


def _watch_layers(hooks: ExitStack, model: Any, hidden_layers: Sequence[int]) -> dict[int, torch.Tensor]:
    """Filled during the pass: i < num_layers is the input of layer i, num_layers the output of the last [B, Q, hidden].

    Raises UnsupportedModelError if the model's layers cannot be found.
    """
    seen: dict[int, torch.Tensor] = {}
    if not hidden_layers:
        return seen
    num_layers = text_config(model).num_hidden_layers
    lists = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) == num_layers]
    if not lists:
        raise UnsupportedModelError(f"the layers of {type(model).__name__} were not found: no hidden states of them")
    layers = lists[0]

    def watch_input(index: int) -> None:
        def keep(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            seen[index] = args[0] if args else kwargs["hidden_states"]

        hooks.callback(layers[index].register_forward_pre_hook(keep, with_kwargs=True).remove)

    def watch_output() -> None:
        def keep(module: Any, args: tuple[Any, ...], output: Any) -> None:
            seen[num_layers] = output[0] if isinstance(output, tuple) else output

        hooks.callback(layers[-1].register_forward_hook(keep).remove)

    for layer in hidden_layers:
        if layer == num_layers:
            watch_output()
        else:
            watch_input(layer)
    return seen
