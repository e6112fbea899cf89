"""Logits against independent references: Transformers on the same weights, in float32."""

import numpy as np
import pytest

from foredraft.models.architecture import read_architecture
from foredraft.models.base import Rows
from foredraft.models.gguf import load_core, read_gguf
from foredraft.models.load import load_model
from foredraft.testing.reference_decoder import reference_logits
from tests.models.transformers_models import FOLDER, VARIANTS, make_model

#: Past gemma3's window of 16, and past the 64 positions of llama3's scaling.
TOKENS = [int(token) for token in np.random.default_rng(1).integers(0, 320, 100)]
CHUNK = 37


@pytest.fixture(scope="module", params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def expected(variant: str) -> np.ndarray:
    import torch

    with torch.inference_mode():
        return make_model(variant)(torch.tensor([TOKENS])).logits[0].numpy()


def test_plain_reference_equals_transformers(variant: str, expected: np.ndarray) -> None:
    file = read_gguf(FOLDER / f"{variant}.gguf")
    logits = reference_logits(file, read_architecture(file.metadata, file.tensors), TOKENS)
    assert np.abs(logits - expected).max() < 1e-4


def test_core_equals_transformers(variant: str, expected: np.ndarray) -> None:
    for kernels in load_core().kernel_sets():
        pool = load_core().ThreadPool(2)
        model = load_model(FOLDER / f"{variant}.gguf", pool=pool, kv_cache_dtype="f32", kernels=kernels, cache=False)
        table = np.array([3, 0, 2, 5, 1], dtype=np.int32)
        chunks = [TOKENS[start : start + CHUNK] for start in range(0, len(TOKENS), CHUNK)]
        logits = [
            model.forward([Rows(table, i * CHUNK, chunk, num_logits=len(chunk))]).copy()
            for i, chunk in enumerate(chunks)
        ]
        worst = np.abs(np.concatenate(logits) - expected).max()
        assert worst < 1e-4, kernels
