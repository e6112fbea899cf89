"""Logits against independent references: Transformers on the same weights, in float32."""

import numpy as np
import pytest

from foredraft.models.architecture import read_architecture
from foredraft.models.gguf import read_gguf
from foredraft.testing.reference_decoder import reference_logits
from tests.models.transformers_models import FOLDER, VARIANTS, make_model

#: Past gemma3's window of 16, and past the 64 positions of llama3's scaling.
TOKENS = [int(token) for token in np.random.default_rng(1).integers(0, 320, 150)]


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def expected(variant: str) -> np.ndarray:
    import torch

    with torch.inference_mode():
        return make_model(variant)(torch.tensor([TOKENS])).logits[0].numpy()


def test_plain_reference_equals_transformers(variant: str, expected: np.ndarray) -> None:
    file = read_gguf(FOLDER / f"{variant}.gguf")
    logits = reference_logits(file, read_architecture(file.metadata, file.tensors), TOKENS)
    assert np.abs(logits - expected).max() < 1e-4
