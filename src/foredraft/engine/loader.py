"""Models and tokenizers by name, each on the backend that its files are for."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from foredraft.errors import NativeCoreError, ParameterError
from foredraft.models.base import ImageReader, LanguageModel, TextTokenizer
from foredraft.models.gguf import load_core, read_gguf
from foredraft.models.hf.extra import require_hf
from foredraft.models.hub import is_hub_id, resolve
from foredraft.models.load import KVCacheDtype, Quantize, load_model
from foredraft.models.native import MemoryPlan
from foredraft.models.tokenizer import Tokenizer
from foredraft.types import MAX_THREADS, check_choice, check_whole

if TYPE_CHECKING:
    from foredraft._native import ThreadPool
    from foredraft.models.hf.load import HFOptions

#: Called while something long goes on at load: what, units done, units in all.
LoadProgress = Callable[[str, int, int], None]
Backend = Literal["native", "hf"]
Dtype = Literal["auto", "float32", "float16", "bfloat16"]


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How all models of an engine are loaded; `LLM` says what the fields mean. Raises ParameterError."""

    backend: Backend | None = None
    threads: int | None = None
    max_num_seqs: int = 8
    kv_cache_tokens: int | None = None
    kv_cache_dtype: KVCacheDtype = "f16"
    kernels: str | None = None
    device: str | None = None
    device_map: str | None = None
    dtype: Dtype = "auto"
    trust_remote_code: bool = False
    fixed_rows: int = 0  # of the target

    def __post_init__(self) -> None:
        if self.backend is not None:
            check_choice("backend", self.backend, get_args(Backend))
        if self.threads is not None:
            check_whole("threads", self.threads, 1, MAX_THREADS)
        if not isinstance(self.kernels, str | None):
            raise ParameterError("kernels", "must be the name of a kernel set, as foredraft doctor lists them")
        check_choice("dtype", self.dtype, get_args(Dtype))


class ModelLoader:
    """Loads by name: `.gguf` paths, catalogue names and hub ids for the CPU core, folders of Transformers for `hf`.

    With backend "hf" hub ids are Transformers' too. Models of the core share one pool of threads. `memory_plans`: of
    the core's models loaded so far.
    """

    def __init__(self, options: LoadOptions, progress: LoadProgress | None = None) -> None:
        self._options = options
        self._progress = progress
        self.memory_plans: list[MemoryPlan] = []

    def backend_of(self, name: str) -> Backend:
        """Raises ParameterError where the name is not of the kind that was asked for."""
        is_folder = (Path(os.path.expanduser(name), "config.json")).is_file()
        if is_folder and self._options.backend == "native":
            raise ParameterError("backend", f"native reads .gguf files, and {name} is a folder of Transformers: use hf")
        if is_folder or (self._options.backend == "hf" and is_hub_id(name)):
            return "hf"
        return "native"

    def load_target(self, name: str, max_model_len: int | None) -> LanguageModel:
        if self._options.backend == "hf" and self.backend_of(name) == "native":
            raise ParameterError("backend", f"hf reads folders and hub ids of Transformers, and {name} is neither")
        return self._load(name, max_model_len=max_model_len, fixed_rows=self._options.fixed_rows)

    def load_draft(self, name: str, quantize: Quantize | None) -> LanguageModel:
        """`quantize` is for models of the core."""
        return self._load(name, quantize=quantize)

    def read_tokenizer(self, name: str) -> TextTokenizer:
        if self.backend_of(name) == "native":
            return Tokenizer(read_gguf(self._find(name)).metadata)
        require_hf()
        from foredraft.models.hf.load import read_hf_tokenizer

        return read_hf_tokenizer(os.path.expanduser(name), self._hf_options)

    def load_images(self, name: str, model: LanguageModel, tokenizer: TextTokenizer) -> ImageReader | None:
        """How a model, loaded by this name, reads images; None: it reads text only."""
        if self.backend_of(name) == "native":
            return None
        from foredraft.models.hf.load import load_hf_images
        from foredraft.models.hf.model import HFModel

        if not isinstance(model, HFModel):
            raise TypeError(f"{name} is of another backend")
        return load_hf_images(os.path.expanduser(name), self._hf_options, model, tokenizer)

    def see_alike(self, images: ImageReader | None, others: ImageReader | None) -> bool:
        """Whether two models read the same of an image; see `read_alike`."""
        if images is None or others is None or images.refusal is not None or others.refusal is not None:
            return False
        from foredraft.models.hf.processor import read_alike

        return read_alike(images, others)

    @property
    def has_core(self) -> bool:
        """Whether the C++ core is there: models of Transformers run without it."""
        try:
            load_core()
        except NativeCoreError:
            return False
        return True

    def _load(
        self, name: str, *, max_model_len: int | None = None, quantize: Quantize | None = None, fixed_rows: int = 0
    ) -> LanguageModel:
        options = self._options
        if self.backend_of(name) == "hf":
            require_hf()
            from foredraft.models.hf.load import load_hf_model

            return load_hf_model(
                os.path.expanduser(name),
                self._hf_options,
                fixed_rows=fixed_rows,
                max_model_len=max_model_len,
                max_num_seqs=options.max_num_seqs,
                kv_cache_tokens=options.kv_cache_tokens,
            )
        path = self._find(name)
        model = load_model(
            path,
            pool=self._pool,
            max_model_len=max_model_len,
            kv_cache_dtype=options.kv_cache_dtype,
            max_num_seqs=options.max_num_seqs,
            kv_cache_tokens=options.kv_cache_tokens,
            quantize=quantize,
            kernels=options.kernels,
            progress=self._named(f"repacking {path.stem}"),
        )
        self.memory_plans.append(model.memory_plan)
        return model

    def _find(self, name: str) -> Path:
        load_core()  # nothing is pulled in vain
        return resolve(name, progress=self._named(f"pulling {name}"))

    def _named(self, what: str) -> Callable[[int, int], None] | None:
        return None if self._progress is None else partial(self._progress, what)

    @cached_property
    def _pool(self) -> ThreadPool:
        core = load_core()
        pool: ThreadPool = core.ThreadPool(self._options.threads or core.default_threads())
        return pool

    @property
    def _hf_options(self) -> HFOptions:
        from foredraft.models.hf.load import HFOptions

        options = self._options
        return HFOptions(
            device=options.device,
            device_map=options.device_map,
            dtype=options.dtype,
            trust_remote_code=options.trust_remote_code,
            threads=options.threads,
        )
