"""Speculative decoding for models of Transformers: one line changes. Needs the extra `[hf]`."""

from foredraft.models.hf.extra import require_hf

require_hf()

from foredraft.hf.generate import generate  # noqa: E402  # says what is missing first

__all__ = ["generate"]
