"""Metadata of a model file, checked as they are read."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from foredraft.errors import ModelFileError


class Fields:
    """`prefix` is what stands before each key in the metadata, and in what is said of it."""

    def __init__(self, metadata: Mapping[str, Any], prefix: str = "") -> None:
        self._metadata = metadata
        self._prefix = prefix

    def get(self, key: str) -> Any:
        return self._metadata.get(self._prefix + key)

    def count(self, key: str, default: int | None = None) -> int:
        """A whole number in 1 .. 2**31 - 1. A list of equal numbers, one a layer, counts as the number."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, list) and value and all(v == value[0] for v in value):
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
            raise ModelFileError(self._problem(key, value, "a positive whole number"))
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
            raise ModelFileError(self._problem(key, value, "a positive number"))
        return float(value)

    def optional_number(self, key: str) -> float:
        """A number where 0 or nothing means that the model does not use it."""
        return self.number(key) if self.get(key) else 0.0

    def _problem(self, key: str, value: Any, wanted: str) -> str:
        name = self._prefix + key
        if value is None:
            return f"{name} is missing; the file is incomplete"
        return f"{name} is {str(value)[:40]}, not {wanted}; the file is damaged"
