"""A model's passes on the engine's cache, held against its own: what no list of architectures can promise."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from foredraft.errors import UnsupportedModelError
from foredraft.models.base import BLOCK_SIZE, Rows
from foredraft.models.hf.checks import text_config
from foredraft.models.hf.model import HFModel
from foredraft.types import PicturePrompt

#: How far logits may be from the model's own, as a share of their spread: rounding, and a router that tips over.
TOLERANCE = 0.01
LOW_PRECISION_TOLERANCE = 0.3
#: Attributes of a model that has passed.
_PASSED = "_foredraft_probed"
_PASSED_PICTURES = "_foredraft_probed_pictures"


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
    _compare(model, name, zip(("a chain", "a branch", "a second sequence"), ours, own, strict=True))


@dataclass(frozen=True, slots=True)
class PictureAnswer:
    """What a model itself says to a prompt with pictures.

    tokens: two of them; logits [vocab]: before, between and behind these.
    """

    prompt: PicturePrompt
    tokens: Sequence[int]
    logits: Sequence[np.ndarray]


def probe_pictures_once(model: Any, answer: Callable[[], PictureAnswer | None], *, name: str) -> None:
    """`probe_pictures` with the model's own answer, unless it has passed before, or there is none."""
    attention = text_config(model)._attn_implementation
    if getattr(model, _PASSED_PICTURES, None) == attention:
        return
    own = answer()
    if own is not None:
        probe_pictures(model, own, name=name)
        setattr(model, _PASSED_PICTURES, attention)


@torch.no_grad()
def probe_pictures(model: Any, own: PictureAnswer, *, name: str) -> None:
    """Run the prompt, cut within its first picture, and a tree behind it, beside the model's own answer.

    Raises UnsupportedModelError if a pass fails, or its logits are not the model's.
    """
    prompt, pictures = own.prompt, own.prompt.pictures
    runner = HFModel(model, name=name, num_blocks=-(-(len(prompt) + 3) // BLOCK_SIZE))
    table = np.arange(runner.num_blocks, dtype=np.int32)
    for picture in pictures:
        runner.see(picture)
    cut = pictures[0].start + (pictures[0].num_tokens + 1) // 2
    runner.forward([Rows(table, 0, prompt[:cut], num_logits=0, pictures=pictures)])
    ours = [runner.forward([Rows(table, cut, prompt[cut:], pictures=pictures)])[0]]
    side = (own.tokens[0] + 1) % runner.vocab_size
    tree = Rows(table, len(prompt), [side, *own.tokens], parents=[-1, -1, 1], num_logits=2, pictures=pictures)
    ours += list(runner.forward([tree]))
    wheres = "a prompt with an image", "an answer to it", "a longer answer"
    _compare(model, name, zip(wheres, ours, own.logits, strict=True))


def _compare(model: Any, name: str, logits: Iterable[tuple[str, np.ndarray, np.ndarray]]) -> None:
    """Where, ours, its own. Raises UnsupportedModelError."""
    tolerance = TOLERANCE if model.dtype in (torch.float32, torch.float64) else LOW_PRECISION_TOLERANCE
    for where, got, wanted in logits:
        distance = np.sqrt(np.mean((got - wanted) ** 2)) / np.std(wanted)
        if not distance <= tolerance:
            raise UnsupportedModelError(
                f"{name} cannot be speculated with: its logits of {where} differ from its own plain ones "
                f"(by {distance:.2g} of their spread): its rows depend on each other (as "
                "those of LLM.int8() do), or its attention does not follow the engine's masks; "
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
