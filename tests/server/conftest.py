from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.serving import Server, running_server


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """One server for the tests of a module that leave it as it was."""
    with running_server() as running:
        yield running
