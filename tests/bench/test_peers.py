"""The loop around a peer's passes, on a context that knows one text by heart."""

import pytest

from foredraft.bench import peers
from foredraft.bench.machine import Meter
from foredraft.bench.peers import check_peers
from foredraft.bench.peers.greedy import GreedyPeer, count_drafts
from foredraft.errors import ForedraftError, ParameterError

PROMPT = [1, 2, 3, 4, 5]
ANSWER = [11, 12, 13, 14, 15, 16, 17, 0]
EOS = 0


class Recital:
    """Continues PROMPT with ANSWER; after anything else it says 99."""

    def __init__(self) -> None:
        self.cached: list[int] = []
        self.passes: list[int] = []

    def cut(self, length: int) -> None:
        del self.cached[length:]

    def forward(self, tokens: list[int], num_logits: int = 1) -> list[int]:
        self.passes.append(len(tokens))
        text = PROMPT + ANSWER
        outputs = []
        for token in tokens:
            self.cached.append(token)
            n = len(self.cached)
            outputs.append(text[n] if n < len(text) and self.cached == text[:n] else 99)
        return outputs[len(outputs) - num_logits :]


def answer(context: Recital, propose=None, max_tokens: int = 20, chunk: int = 3):
    peer = GreedyPeer("peer", context, frozenset({EOS}), Meter(), description="", chunk=chunk, propose=propose)
    return peer.run(PROMPT, max_tokens)


def test_plain_takes_a_pass_a_token_and_ends_with_the_end() -> None:
    context = Recital()
    run = answer(context)
    assert list(run.token_ids) == ANSWER
    assert context.passes == [3, 2, 1, 1, 1, 1, 1, 1, 1]
    assert run.speculation is None
    assert run.num_prompt_tokens == 5


def test_a_second_run_forgets_the_first() -> None:
    context = Recital()
    assert answer(context).token_ids == answer(context).token_ids


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5, 8])
def test_drafts_change_the_passes_and_not_the_text(max_tokens: int) -> None:
    def propose(tokens: list[int]) -> list[int]:  # right, right, wrong
        n = len(tokens) - len(PROMPT)
        return [*ANSWER[n : n + 2], 98]

    run = answer(Recital(), propose, max_tokens)
    assert list(run.token_ids) == ANSWER[:max_tokens]


def test_accepted_drafts_save_passes() -> None:
    def propose(tokens: list[int]) -> list[int]:
        n = len(tokens) - len(PROMPT)
        return [*ANSWER[n : n + 2], 98]

    context = Recital()
    run = answer(context, propose)
    assert list(run.token_ids) == ANSWER
    assert context.passes == [3, 2, 4, 4, 3]
    assert run.speculation is not None
    assert (run.speculation.num_drafts, run.speculation.accepted_per_position) == (3, (3, 2))


def test_counting() -> None:
    stats = count_drafts([(2, 2), (0, 0), (2, 1), (2, 0)], num_decoded=7)
    assert (stats.num_passes, stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (4, 3, 6, 3)
    assert (stats.acceptance_rate, stats.mean_acceptance_length, stats.tokens_per_pass) == (0.5, 2.0, 1.75)
    assert stats.accepted_per_position == (2, 1)
    assert count_drafts([], num_decoded=0).accepted_per_position == ()


def test_unknown_peers_are_named() -> None:
    with pytest.raises(ParameterError, match=r"'vllm' is not one of llama\.cpp"):
        check_peers(["vllm"])


def test_a_missing_package_comes_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = peers.PeerPackage("none", ("json", "foredraft_peer_that_is_not_there"), ())
    monkeypatch.setattr(peers, "PEERS", {"there": peers.PEERS["transformers"], "gone": missing})
    assert check_peers(["there"]) == ["transformers", "torch"]
    with pytest.raises(ForedraftError, match=r'the peer gone lacks foredraft_peer_\w+: pip install "\.\[peers\]"'):
        check_peers(["there", "gone"])
