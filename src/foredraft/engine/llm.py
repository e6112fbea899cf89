"""The library's front door: a model by name, a drafter by name, and text."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Literal, get_args

from foredraft.algo.sampler import RejectionMethod
from foredraft.drafters.registry import DraftContext, make_drafters
from foredraft.engine.generator import Generator
from foredraft.errors import ParameterError
from foredraft.models.gguf import load_core, read_gguf
from foredraft.models.hub import resolve
from foredraft.models.load import KVCacheDtype, Quantize, load_model
from foredraft.models.native import MemoryPlan, NativeModel
from foredraft.models.tokenizer import Tokenizer
from foredraft.types import MAX_THREADS, check_choice, check_whole

if TYPE_CHECKING:
    from foredraft._native import ThreadPool

#: Called while something long goes on at load: what, units done, units in all.
LoadProgress = Callable[[str, int, int], None]

DraftQuantize = Literal["auto", "q4", "q8", "none"]
#: What "auto" means for drafts; benchmarks/draft_optimiser.md has the measurements behind it.
AUTO_DRAFT_QUANTIZE: Quantize = "q4"
AUTO_DRAFT_VOCAB = 32_768


class LLM(Generator):
    """A target model with its drafters on the CPU core.

    model: a `.gguf` path, a catalogue name, or a hub id `org/repo[:file]`; pulled on first use. drafter: `none`,
    `ngram`, `model:NAME`, or several joined by `+`. num_speculative_tokens: largest draft. threads: None takes the
    cores that this process may use. max_model_len: None takes the model's own context. kv_cache_tokens: what each
    model's cache holds, all sequences together; sequences that do not fit wait, or give way for a while. None: enough
    for max_num_seqs of them, within limits (see `load_model`). draft_quantize, draft_vocab: how
    a draft model is made smaller (any draft is lossless); "auto" is what measured best. adaptive: measured costs choose
    lengths and switch drafters off that do not pay; False always drafts the full length.

    Raises ForedraftError (see `foredraft.errors`) with the cause and the cure.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        drafter: str = "ngram",
        *,
        num_speculative_tokens: int | None = None,
        rejection_sample_method: RejectionMethod = "standard",
        draft_quantize: DraftQuantize = "auto",
        draft_vocab: int | Literal["auto", "full"] = "auto",
        prompt_lookup_min: int | None = None,
        prompt_lookup_max: int | None = None,
        adaptive: bool = True,
        threads: int | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 512,
        kv_cache_tokens: int | None = None,
        enable_prefix_caching: bool = True,
        kv_cache_dtype: KVCacheDtype = "f16",
        kernels: str | None = None,
        progress: LoadProgress | None = None,
    ) -> None:
        began = perf_counter()
        core = load_core()
        if not isinstance(drafter, str):
            raise ParameterError("drafter", "must be text: 'none' for plain decoding, 'ngram', 'model:NAME' ...")
        if threads is not None:
            check_whole("threads", threads, 1, MAX_THREADS)
        for name, value in (("prompt_lookup_min", prompt_lookup_min), ("prompt_lookup_max", prompt_lookup_max)):
            if value is not None:
                check_whole(name, value, 1)
        check_choice("draft_quantize", draft_quantize, get_args(DraftQuantize))
        if draft_vocab not in ("auto", "full"):
            check_whole("draft_vocab", draft_vocab, 1)
        pool: ThreadPool = core.ThreadPool(threads or core.default_threads())

        def find(name: str | os.PathLike[str]) -> Path:
            return resolve(os.fspath(name), progress=_named(progress, f"pulling {name}"))

        def read_tokenizer(name: str | os.PathLike[str]) -> Tokenizer:
            return Tokenizer(read_gguf(find(name)).metadata)

        def load(name: str | os.PathLike[str], length: int | None, quantize: Quantize | None) -> NativeModel:
            path = find(name)
            return load_model(
                path,
                pool=pool,
                max_model_len=length,
                kv_cache_dtype=kv_cache_dtype,
                max_num_seqs=max_num_seqs,
                kv_cache_tokens=kv_cache_tokens,
                quantize=quantize,
                kernels=kernels,
                progress=_named(progress, f"repacking {path.stem}"),
            )

        drafts: list[NativeModel] = []

        def load_draft(name: str) -> NativeModel:
            quantize = AUTO_DRAFT_QUANTIZE if draft_quantize == "auto" else draft_quantize
            drafts.append(load(name, None, None if quantize == "none" else quantize))
            return drafts[-1]

        target, tokenizer = load(model, max_model_len, None), read_tokenizer(model)
        head_size = AUTO_DRAFT_VOCAB if draft_vocab == "auto" else None if draft_vocab == "full" else draft_vocab
        context = DraftContext(
            target,
            tokenizer,
            read_tokenizer,
            load_draft,
            prompt_lookup_min,
            prompt_lookup_max,
            head_size,
            enable_prefix_caching,
        )
        drafters = make_drafters(drafter, context)
        self.memory_plans: list[MemoryPlan] = [m.memory_plan for m in (target, *drafts)]
        super().__init__(
            target,
            tokenizer,
            drafters,
            num_speculative_tokens=num_speculative_tokens,
            rejection_sample_method=rejection_sample_method,
            adaptive=adaptive,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            enable_prefix_caching=enable_prefix_caching,
            load_s=perf_counter() - began,
        )


def _named(progress: LoadProgress | None, what: str) -> Callable[[int, int], None] | None:
    return None if progress is None else partial(progress, what)
