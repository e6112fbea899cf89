"""The Python that docs/server.md shows works as it stands there, on real weights."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from foredraft import LLM
from tests.server.serving import PATIENCE, running_server

PAGE = (Path(__file__).parents[2] / "docs" / "server.md").read_text()
#: Where the page's server is, and the name it serves.
URL, NAME = "http://127.0.0.1:8000", "qwen2.5-coder-1.5b"
SHOW_TOOLS = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("smollm2-135m", marks=pytest.mark.real),
        pytest.param("qwen2.5-coder-0.5b", marks=pytest.mark.pair),
    ],
)
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    llm: Any = LLM(request.param, "ngram", max_model_len=2048)
    llm.gate = threading.Event()  # as the server of these tests expects it
    if "tools" not in llm.tokenizer.chat_template:
        llm.tokenizer.chat_template = SHOW_TOOLS + llm.tokenizer.chat_template
    with running_server(llm, model_names=(NAME,)) as server:
        yield server.url


def test_the_python_examples(url: str) -> None:
    """One after another: the later ones use the client of the first."""
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    script = "\n".join(blocks).replace(URL, url)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, timeout=5 * PATIENCE
    )
    assert done.returncode == 0, done.stderr
    assert "accepted_prediction_tokens" in done.stdout
