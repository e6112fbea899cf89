"""The drafter that docs/add_a_drafter.md writes works as the page says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from foredraft.engine.generator import Generator
from foredraft.testing import ByteTokenizer
from tests.engine.build import target
from tests.engine.test_lossless import GREEDY, PROMPTS, ids

PAGE = Path(__file__).parents[2] / "docs" / "add_a_drafter.md"


def test_the_page_s_drafter_changes_no_token() -> None:
    code = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[0]
    names: dict[str, Any] = {"__name__": "echo"}
    exec(compile(code, "echo.py", "exec"), names)
    plain = Generator(target(), ByteTokenizer(), native=False)
    echo = Generator(target(), ByteTokenizer(), [names["EchoDrafter"]()], native=False, adaptive=False)
    drafted = echo.generate(PROMPTS, GREEDY)
    assert ids(drafted) == ids(plain.generate(PROMPTS, GREEDY))
    assert all(out.speculation.num_draft_tokens > 0 for out in drafted)
