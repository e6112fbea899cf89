"""Lossless speculative decoding: the output of the target model, sooner.

from foredraft import LLM, SamplingParams

llm = LLM("qwen2.5-coder-1.5b", drafter="ngram+model:qwen2.5-coder-0.5b")
for chunk in llm.stream("def fib(n):", SamplingParams(max_tokens=64)):
    print(chunk.text, end="")
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foredraft.engine.llm import LLM
    from foredraft.errors import ForedraftError
    from foredraft.types import Chunk, Completion, SamplingParams, StructuredOutputs

__all__ = ["LLM", "Chunk", "Completion", "ForedraftError", "SamplingParams", "StructuredOutputs"]


def __getattr__(name: str) -> Any:
    """On first use: `LLM` loads tokenizers and the core, and the command must not wait before it minds Ctrl-C."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "LLM":
        from foredraft.engine.llm import LLM

        return LLM
    from foredraft import errors, types

    return getattr(errors if name == "ForedraftError" else types, name)
