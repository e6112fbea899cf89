from __future__ import annotations

from dataclasses import replace

import pytest

from foredraft.cli.rounds import describe_round
from foredraft.engine.stats import Round
from foredraft.testing import ByteTokenizer

ROUND = Round(
    sequence_id=0,
    num_prompt_rows=0,
    num_batch_rows=4,
    proposed=b"abc",
    source="ngram",
    accepted=b"a",
    rejected=b"bc",
    token=ord("x"),
    draft_s=0.0001,
    pass_s=0.031,
    verify_s=0.0002,
)
TIMES = "draft 0.10 ms, pass 31.0 ms of 4 rows, verify 0.20 ms"


@pytest.mark.parametrize(
    ("round", "line"),
    [
        (ROUND, f"   7  ngram 1/3  accepted 'a'  rejected 'b'·'c'  then 'x'  {TIMES}"),
        (replace(ROUND, accepted=b"abc", rejected=b""), f"   7  ngram 3/3  accepted 'a'·'b'·'c'  then 'x'  {TIMES}"),
        (replace(ROUND, accepted=b"", rejected=b"abc"), f"   7  ngram 0/3  rejected 'a'·'b'·'c'  then 'x'  {TIMES}"),
        (replace(ROUND, rejected=b"", token=None), f"   7  ngram 1/3  accepted 'a'  {TIMES}"),  # it ended the text
        (replace(ROUND, proposed=b"", accepted=b"", rejected=b""), f"   7  then 'x'  {TIMES.partition(', ')[2]}"),
        (
            replace(ROUND, proposed=b"", accepted=b"", rejected=b"", token=None, num_prompt_rows=512),
            f"   7  prompt, 512 tokens  {TIMES.partition(', ')[2]}",
        ),
    ],
)
def test_describe_round(round: Round, line: str) -> None:
    assert describe_round(7, round, ByteTokenizer()).plain == line
