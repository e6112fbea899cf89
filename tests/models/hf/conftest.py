"""The same as for `generate`: one thread."""

from tests.hf.conftest import one_thread

__all__ = ["one_thread"]
