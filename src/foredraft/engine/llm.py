"""The library's front door: a model by name, a drafter by name, and text."""

from __future__ import annotations

import os
from time import perf_counter
from typing import Literal, get_args

from foredraft.algo.sampler import RejectionMethod
from foredraft.drafters.cross_vocab import CrossVocab
from foredraft.drafters.registry import DraftContext, make_drafters
from foredraft.engine.generator import DEFAULT_MAX_DRAFT, Generator
from foredraft.engine.loader import Backend, Dtype, LoadOptions, LoadProgress, ModelLoader, Quantization
from foredraft.errors import ModelFileError, ParameterError
from foredraft.models.base import LanguageModel, TextTokenizer
from foredraft.models.load import KVCacheDtype, Quantize
from foredraft.models.tokenizer import Tokenizer
from foredraft.types import check_choice, check_whole

#: What "auto" means for drafts; benchmarks/draft_optimiser.md has the measurements behind it.
AUTO_DRAFT_QUANTIZE: Quantize = "q4"
AUTO_DRAFT_VOCAB = 32_768


class LLM(Generator):
    """A target model with its drafters, on the CPU core or, for models of Transformers, on torch.

    model: a `.gguf` path, a folder of Transformers (config.json, safetensors, tokenizer), a catalogue name, or a hub id
    `org/repo[:file.gguf]` of a repository with either; the last two are pulled on first use. drafter: `none`, `ngram`,
    `model:NAME`, or several joined by `+`. num_speculative_tokens: largest draft. threads: None takes the cores that
    this process may use. max_model_len: None takes the model's own context. kv_cache_tokens: what each model's cache
    holds, all sequences together; sequences that do not fit wait, or give way for a while. None: enough for
    max_num_seqs of them, within limits (see `load_model`). draft_quantize, draft_vocab: how a draft model is made
    smaller (any draft is lossless); "auto" is what measured best. cross_vocab: how a draft model of another tokenizer
    drafts: "text", "tli" (see `drafters/cross_vocab.py`), "auto" by request, "off" not at all. adaptive: measured costs
    choose lengths and switch drafters off that do not pay; False always drafts the full length.

    quantize: the model's weights on the CPU core, "q4", "q8" or as they are ("none"); "auto" keeps those of a GGUF file
    and makes a folder's q8. backend: "native" is the CPU core; "hf" is Transformers (extra `[hf]`), which loads hub ids
    by itself; "auto" is native for GGUF files, and for folders with safetensors of a family that the core knows, unless
    an argument of the next line is given.

    Of models of Transformers: device: where they are, for example "cuda:1"; None takes the first GPU, if there is one.
    device_map: "auto" spreads them over devices. dtype: "auto" takes the checkpoint's. trust_remote_code: run code that
    the repository brings. fixed_rows: fill every pass of the target up to the rows of the longest draft, so that texts
    have the same bits with any draft (see docs/transformers.md). enforce_eager: no CUDA graphs, which short passes on a
    GPU are captured in.
    tensor_parallel_size: processes that share the model's weights and cache, one a GPU, or on the CPU; they end with
    `close`. draft_tensor_parallel_size: the same for a draft model, 1 (it runs in this process alone) or as many.

    Raises ForedraftError (see `foredraft.errors`) with the cause and the cure.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        drafter: str = "ngram",
        *,
        num_speculative_tokens: int | None = None,
        rejection_sample_method: RejectionMethod = "standard",
        draft_quantize: Quantization = "auto",
        draft_vocab: int | Literal["auto", "full"] = "auto",
        cross_vocab: CrossVocab | Literal["off"] = "auto",
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
        quantize: Quantization = "auto",
        backend: Backend = "auto",
        device: str | None = None,
        device_map: str | None = None,
        dtype: Dtype = "auto",
        trust_remote_code: bool = False,
        fixed_rows: bool = False,
        enforce_eager: bool = False,
        tensor_parallel_size: int = 1,
        draft_tensor_parallel_size: int = 1,
        progress: LoadProgress | None = None,
    ) -> None:
        began = perf_counter()
        if not isinstance(model, str | os.PathLike) or not isinstance(os.fspath(model), str):
            raise ParameterError("model", "must be a path or a name, as text or a pathlib.Path")
        if not isinstance(drafter, str):
            raise ParameterError("drafter", "must be text: 'none' for plain decoding, 'ngram', 'model:NAME' ...")
        if progress is not None and not callable(progress):
            raise ParameterError("progress", "must be a function of what is done, how much of it, and of how much")
        flags = {
            "adaptive": adaptive,
            "enable_prefix_caching": enable_prefix_caching,
            "enforce_eager": enforce_eager,
        }
        for name, flag in flags.items():
            if not isinstance(flag, bool):
                raise ParameterError(name, "must be true or false")
        for name, value in (("prompt_lookup_min", prompt_lookup_min), ("prompt_lookup_max", prompt_lookup_max)):
            if value is not None:
                check_whole(name, value, 1)
        check_choice("draft_quantize", draft_quantize, get_args(Quantization))
        check_choice("cross_vocab", cross_vocab, (*get_args(CrossVocab), "off"))
        if draft_vocab not in ("auto", "full"):
            check_whole("draft_vocab", draft_vocab, 1)
        max_draft = DEFAULT_MAX_DRAFT if num_speculative_tokens is None else num_speculative_tokens
        options = LoadOptions(
            backend=backend,
            quantize=quantize,
            threads=threads,
            max_num_seqs=max_num_seqs,
            kv_cache_tokens=kv_cache_tokens,
            kv_cache_dtype=kv_cache_dtype,
            kernels=kernels,
            device=device,
            device_map=device_map,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            fixed_rows=1 + max_draft if fixed_rows else 0,
            enforce_eager=enforce_eager,
            tensor_parallel_size=tensor_parallel_size,
            draft_tensor_parallel_size=draft_tensor_parallel_size,
        )
        self._loader = loader = ModelLoader(options, progress)

        def load_draft(name: str) -> LanguageModel:
            quantize = AUTO_DRAFT_QUANTIZE if draft_quantize == "auto" else draft_quantize
            return loader.load_draft(name, None if quantize == "none" else quantize)

        name = os.fspath(model)
        target, tokenizer = loader.load_target(name, max_model_len), loader.read_tokenizer(name)
        if isinstance(tokenizer, Tokenizer) and tokenizer.vocab_size > target.vocab_size:
            raise ModelFileError(
                f"{name}: {tokenizer.vocab_size} tokens, and an embedding of {target.vocab_size}; the file is damaged"
            )
        images = loader.load_images(name, target, tokenizer)

        def sees_alike(name: str, draft: LanguageModel, tokenizer: TextTokenizer) -> bool:
            return images is not None and loader.see_alike(images, loader.load_images(name, draft, tokenizer))

        head_size = AUTO_DRAFT_VOCAB if draft_vocab == "auto" else None if draft_vocab == "full" else draft_vocab
        context = DraftContext(
            target,
            tokenizer,
            loader.read_tokenizer,
            load_draft,
            prompt_lookup_min,
            prompt_lookup_max,
            head_size,
            cross_vocab,
            enable_prefix_caching,
            loader.has_core,
            sees_alike,
        )
        drafters = make_drafters(drafter, context)
        self.memory_plans = loader.memory_plans
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
            native=loader.has_core,
            images=images,
            load_s=perf_counter() - began,
        )

    def close(self) -> None:
        """Abort whatever runs and give back all that it held. Open streams end. Processes of its own end."""
        super().close()
        self._loader.close()
