"""The peers themselves, on smollm2: the same answers as the library wherever rounding cannot matter."""

from pathlib import Path

import pytest

from foredraft.bench.machine import Meter
from foredraft.bench.peers import PEERS, PeerSettings, make_peer
from foredraft.models.gguf import read_gguf
from foredraft.models.hub import resolve
from foredraft.models.tokenizer import Tokenizer

QUESTION = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")  # theirs
@pytest.mark.parametrize("name", PEERS)
def test_a_peer_knows_a_capital(name: str) -> None:
    path: Path = resolve("smollm2-135m")
    tokenizer = Tokenizer(read_gguf(path).metadata)
    prompt = tokenizer.encode(QUESTION, add_special=True, parse_special=True)
    peer = make_peer(name, PeerSettings(path, 2, 256, tokenizer.eos_ids, Meter()))
    for max_tokens in (20, 3):
        run = peer.run(prompt, max_tokens)
        assert "The capital of France is Paris.".startswith(tokenizer.decode(run.token_ids))
        assert run.num_prompt_tokens == len(prompt)
        assert run.decode.wall_s > 0
        assert run.token_ids[-1] in tokenizer.eos_ids or len(run.token_ids) == max_tokens
