"""Whether the extra is installed."""

from __future__ import annotations

from importlib.util import find_spec

from foredraft.errors import MissingExtraError


def require_hf() -> None:
    """Raises MissingExtraError unless torch and transformers can be imported."""
    missing = [name for name in ("torch", "transformers") if find_spec(name) is None]
    if missing:
        raise MissingExtraError(
            f'{" and ".join(missing)} not installed: pip install ".[hf]" in a clone of the repository'
        )
