"""Other engines on the same weights, prompts and token ids, greedy, each at its best on this machine."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from foredraft.bench.machine import Meter
from foredraft.bench.measure import Engine
from foredraft.errors import ForedraftError, ParameterError


@dataclass(frozen=True, slots=True)
class PeerSettings:
    """What all engines share."""

    path: Path  # of the GGUF file
    threads: int
    max_model_len: int
    eos_ids: frozenset[int]
    meter: Meter


@dataclass(frozen=True, slots=True)
class PeerPackage:
    module: str  # of this room: has `make(name, settings)`
    imports: Sequence[str]
    distributions: Sequence[str]


_LLAMA_CPP = PeerPackage("llama_cpp", ("llama_cpp",), ("llama-cpp-python",))
_TRANSFORMERS = PeerPackage("hf", ("torch", "transformers", "gguf"), ("transformers", "torch"))

#: `:lookup` is the peer's own n-gram speculation.
PEERS: Mapping[str, PeerPackage] = {
    "llama.cpp": _LLAMA_CPP,
    "llama.cpp:lookup": _LLAMA_CPP,
    "transformers": _TRANSFORMERS,
    "transformers:lookup": _TRANSFORMERS,
}


def check_peers(names: Sequence[str]) -> list[str]:
    """Raises for an unknown peer or one that is not installed. Returns the distributions whose versions matter."""
    distributions: dict[str, None] = {}
    for name in names:
        if name not in PEERS:
            raise ParameterError("--peers", f"{name!r} is not one of {', '.join(PEERS)}")
        package = PEERS[name]
        missing = [module for module in package.imports if importlib.util.find_spec(module) is None]
        if missing:
            cure = 'pip install ".[peers]" in a clone of the repository'
            raise ForedraftError(f"the peer {name} lacks {', '.join(missing)}: {cure}")
        distributions.update(dict.fromkeys(package.distributions))
    return list(distributions)


class Peer(Engine, Protocol):
    @property
    def description(self) -> str:
        """Settings that were chosen for it."""
        ...


def make_peer(name: str, settings: PeerSettings) -> Peer:
    """Loads the weights, and tries out the settings that depend on the machine. Slow. See `check_peers`."""
    module = importlib.import_module(f"{__name__}.{PEERS[name].module}")
    peer: Peer = module.make(name, settings)
    return peer
