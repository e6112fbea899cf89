"""Lossless speculative decoding: the output of the target model, sooner.

from foredraft import LLM, SamplingParams

llm = LLM("qwen2.5-coder-1.5b", drafter="ngram+model:qwen2.5-coder-0.5b")
for chunk in llm.stream("def fib(n):", SamplingParams(max_tokens=64)):
    print(chunk.text, end="")
"""

from typing import TYPE_CHECKING, Any

from foredraft.types import Chunk, Completion, SamplingParams

if TYPE_CHECKING:
    from foredraft.engine.llm import LLM

__all__ = ["LLM", "Chunk", "Completion", "SamplingParams"]


def __getattr__(name: str) -> Any:
    if name == "LLM":  # on first use: it loads tokenizers and the core, which `import foredraft` need not wait for
        from foredraft.engine.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
