"""What docs/server.md shows works as it stands there, on real weights."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from foredraft import LLM
from tests.server.serving import PATIENCE, running_server

PAGE = (Path(__file__).parents[2] / "docs" / "server.md").read_text()
#: Where the page's server is, and the name it serves.
URL, NAME = "http://127.0.0.1:8000", "qwen2.5-coder-1.5b"
SHOW_TOOLS = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"


def blocks(language: str) -> list[str]:
    found = re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    assert found
    return found


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
    script = "\n".join(blocks("python")).replace(URL, url)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, timeout=5 * PATIENCE
    )
    assert done.returncode == 0, done.stderr
    assert "accepted_prediction_tokens" in done.stdout


@pytest.mark.parametrize("command", blocks("bash"), ids=lambda command: command[:40])
def test_a_curl_example(url: str, command: str) -> None:
    program, *words = shlex.split(command)
    assert program == "curl"
    (address,) = [word for word in words if word.startswith(URL)]
    header, value = words[words.index("-H") + 1].split(": ")
    body = words[words.index("-d") + 1]
    answer = httpx.post(address.replace(URL, url), headers={header: value}, content=body, timeout=PATIENCE)
    assert answer.status_code == 200, answer.text
    assert '"speculation":' in answer.text
