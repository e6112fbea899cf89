"""What a model has made of images, kept for the next request that shows one of them again."""

from __future__ import annotations

from collections import OrderedDict

from foredraft.models.hf.vision import Features

#: Of the embeddings that a model keeps: some fifty images of LLaVA 1.5 7B (576 rows of 4,096 numbers, 2 bytes each).
MAX_BYTES = 256 << 20


class Encodings:
    """Features by the keys of their pictures.

    Invariant: embeddings take at most `max_bytes` together; those that were used last stay.
    """

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._kept: OrderedDict[bytes, Features] = OrderedDict()
        self._num_bytes = 0

    def find(self, key: bytes) -> Features | None:
        if key in self._kept:
            self._kept.move_to_end(key)
        return self._kept.get(key)

    def keep(self, key: bytes, features: Features) -> None:
        """For a key that is not there."""
        self._kept[key] = features
        self._num_bytes += features.nbytes
        while self._num_bytes > self._max_bytes:
            _, oldest = self._kept.popitem(last=False)
            self._num_bytes -= oldest.nbytes
