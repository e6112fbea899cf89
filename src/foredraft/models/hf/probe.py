"""A model's passes on the engine's cache, held against its own: what no list of architectures can promise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from foredraft.errors import UnsupportedModelError
from foredraft.models.base import BLOCK_SIZE, Rows
from foredraft.models.hf.checks import text_config
from foredraft.models.hf.model import HFModel

#: How far logits may be from the model's own, as a share of their spread: rounding, and a router that tips over.
TOLERANCE = 0.01
LOW_PRECISION_TOLERANCE = 0.3
#: Attribute of a model that has passed.
_PASSED = "_foredraft_probed"


def probe_once(model: Any, *, name: str) -> None:
    """`probe`, unless this very model, with the attention that it has now, has passed it before."""
    attention = text_config(model)._attn_implementation
    if getattr(model, _PASSED, None) != attention:
        probe(model, name=name)
        setattr(model, _PASSED, attention)


def probe(model: Any, *, name: str) -> None:
    """Run a prompt, a tree and a second sequence beside it, and compare with the model without a cache.

    Takes some passes over a few rows and a cache of two blocks. Raises UnsupportedModelError if a pass fails, or its
    logits are not the model's.
    """
    vocab_size = HFModel(model, name=name, num_blocks=1).vocab_size
    trunk, side, other = (_some_tokens(n, salt, vocab_size) for n, salt in ((6, 1), (2, 2), (3, 3)))
    try:
        ours = _run_passes(model, name, trunk, side, other)
        own = [_last_logits(model, tokens) for tokens in (trunk, [*trunk[:4], side[0]], other)]
    except (torch.OutOfMemoryError, UnsupportedModelError):
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UnsupportedModelError(
            f"{name} does not run on the engine's cache: {reason}; use its own generate"
        ) from None
    tolerance = TOLERANCE if model.dtype in (torch.float32, torch.float64) else LOW_PRECISION_TOLERANCE
    for where, got, wanted in zip(("a chain", "a branch", "a second sequence"), ours, own, strict=True):
        distance = np.sqrt(np.mean((got - wanted) ** 2)) / np.std(wanted)
        if not distance <= tolerance:
            raise UnsupportedModelError(
                f"{name} cannot be speculated with: its logits of {where} differ from its own plain ones "
                f"(by {distance:.2g} of their spread): its attention does not follow the engine's masks; "
                "use its own generate"
            )


def _run_passes(
    model: Any, name: str, trunk: Sequence[int], side: Sequence[int], other: Sequence[int]
) -> list[np.ndarray]:
    """Logits after the trunk, after its branch, and after the other text.

    trunk ─ 0 1 2 3 ─┬─ side        The prompt is 0 1 2, the rest a tree, and the branch stands before the trunk's own
                     └─ 4 ─ 5       continuation.
    """
    runner = HFModel(model, name=name, num_blocks=2, max_model_len=BLOCK_SIZE)
    tables = [np.array([1], np.int32), np.array([0], np.int32)]
    runner.forward([Rows(tables[0], 0, trunk[:3], num_logits=0)])
    tree = Rows(tables[0], 3, [trunk[3], side[0], trunk[4], trunk[5]], parents=[-1, 0, 0, 2], num_logits=3)
    logits = runner.forward([tree, Rows(tables[1], 0, other)])
    return [logits[2], logits[0], logits[3]]


def _last_logits(model: Any, tokens: Sequence[int]) -> np.ndarray:
    ids = torch.tensor([list(tokens)], device=model.get_input_embeddings().weight.device)
    with torch.no_grad():
        output = model(input_ids=ids, use_cache=False, return_dict=True)
    logits: np.ndarray = output.logits[0, -1].float().cpu().numpy()
    return logits


def _some_tokens(count: int, salt: int, vocab_size: int) -> list[int]:
    return [(7919 * salt + 104_729 * i) % vocab_size for i in range(1, count + 1)]
