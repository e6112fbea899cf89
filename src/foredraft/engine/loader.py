"""Models and tokenizers by name, each on the backend that its files are for."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from foredraft.errors import MissingExtraError, NativeCoreError, ParameterError, UnsupportedModelError
from foredraft.models.base import ImageReader, LanguageModel, TextTokenizer
from foredraft.models.folder.checkpoint import CONFIG, Checkpoint, read_description
from foredraft.models.folder.tokenizer import check_tokenizer, read_chat_template, read_folder_tokenizer
from foredraft.models.gguf import load_core, read_gguf
from foredraft.models.hf.extra import require_hf
from foredraft.models.hub import find_folder, is_hub_id, resolve
from foredraft.models.load import KVCacheDtype, Quantize, load_model, model_name
from foredraft.models.native import MemoryPlan
from foredraft.models.tokenizer import Tokenizer
from foredraft.types import MAX_THREADS, check_choice, check_whole

if TYPE_CHECKING:
    from foredraft._native import ThreadPool
    from foredraft.models.hf.load import HFOptions
    from foredraft.models.hf.parallel import ParallelModel

#: Called while something long goes on at load: what, units done, units in all.
LoadProgress = Callable[[str, int, int], None]
Backend = Literal["auto", "native", "hf"]
Quantization = Literal["auto", "q4", "q8", "none"]
#: What "auto" means for targets that are folders; GGUF files keep their numbers. benchmarks/quantize.md has the
#: measurements behind it.
AUTO_QUANTIZE: Quantize = "q8"
Dtype = Literal["auto", "float32", "float16", "bfloat16"]


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How all models of an engine are loaded; `LLM` says what the fields mean. Raises ParameterError."""

    backend: Backend = "auto"
    quantize: Quantization = "auto"  # of the target
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
    enforce_eager: bool = False
    tensor_parallel_size: int = 1  # of the target
    draft_tensor_parallel_size: int = 1

    def __post_init__(self) -> None:
        check_choice("backend", self.backend, get_args(Backend))
        check_choice("quantize", self.quantize, get_args(Quantization))
        if self.threads is not None:
            check_whole("threads", self.threads, 1, MAX_THREADS)
        if not isinstance(self.kernels, str | None):
            raise ParameterError("kernels", "must be the name of a kernel set, as foredraft doctor lists them")
        check_choice("dtype", self.dtype, get_args(Dtype))
        check_whole("tensor_parallel_size", self.tensor_parallel_size, 1)
        if self.draft_tensor_parallel_size not in (1, self.tensor_parallel_size):
            raise ParameterError("draft_tensor_parallel_size", "must be 1 or the target's tensor_parallel_size")

    def wish_of_transformers(self) -> str:
        """An option that is given and that only Transformers has, or nothing."""
        own = {name: getattr(self, name) for name in ("device", "device_map", "trust_remote_code", "fixed_rows")}
        given = [name for name, value in own.items() if value]
        given += ["dtype"] * (self.dtype != "auto") + ["tensor_parallel_size"] * (self.tensor_parallel_size > 1)
        return given[0] if given else ""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a model is, and what runs it. `reason`: why that is not the core, where its files are a folder."""

    backend: Literal["native", "hf"]
    path: str
    is_folder: bool = False
    reason: str = ""


class ModelLoader:
    """Loads by name: `.gguf` paths, catalogue names, folders of Transformers and hub ids.

    Backend "auto": GGUF files are for the CPU core, and so are folders with safetensors of a family that it knows,
    unless an option that only Transformers has is given. Of a repository with both the GGUF file is taken, or the
    safetensors if such an option or `quantize` is given. With "hf" Transformers gets hub ids itself, unless the folder
    is here. Models of the core share one pool of threads. `memory_plans`: of the core's models loaded so far.
    """

    def __init__(self, options: LoadOptions, progress: LoadProgress | None = None) -> None:
        self._options = options
        self._progress = progress
        self._places: dict[str, _Place] = {}
        self._shared_out: list[ParallelModel] = []
        self.memory_plans: list[MemoryPlan] = []

    def close(self) -> None:
        """End the processes that share models. The others are freed with their last reader."""
        for model in self._shared_out:
            model.close()

    def load_target(self, name: str, max_model_len: int | None) -> LanguageModel:
        wanted, options = self._options.quantize, self._options
        if options.backend == "hf" and not self._is_for_transformers(name):
            raise ParameterError("backend", f"hf reads folders and hub ids of Transformers, and {name} is neither")
        place = self._locate_target(name)
        if place.backend == "hf" and wanted in get_args(Quantize):
            raise ParameterError("quantize", f"is for models on the CPU core, and not for {name}: {place.reason}")
        self._check_size("tensor_parallel_size", options.tensor_parallel_size, name)
        if wanted == "auto":
            quantize: Quantize | None = AUTO_QUANTIZE if place.is_folder else None
        else:
            quantize = None if wanted == "none" else wanted
        return self._load(
            name,
            options.tensor_parallel_size,
            max_model_len=max_model_len,
            quantize=quantize,
            fixed_rows=options.fixed_rows,
        )

    def load_draft(self, name: str, quantize: Quantize | None) -> LanguageModel:
        """`quantize` is for models of the core."""
        size = self._options.draft_tensor_parallel_size
        self._check_size("draft_tensor_parallel_size", size, name)
        return self._load(name, size, quantize=quantize)

    def has_chat_template(self, name: str) -> bool:
        """Whether the target has one: told before its weights are prepared, which may take long."""
        place = self._locate_target(name)
        if place.backend == "hf":
            return self.read_tokenizer(name).chat_template is not None
        if place.is_folder:
            return read_chat_template(place.path) is not None
        return isinstance(read_gguf(place.path).metadata.get("tokenizer.chat_template"), str)

    def read_tokenizer(self, name: str) -> TextTokenizer:
        place = self._locate(name)
        if place.backend == "native":
            return read_folder_tokenizer(place.path) if place.is_folder else Tokenizer(read_gguf(place.path).metadata)
        self._require_hf(place)
        from foredraft.models.hf.load import read_hf_tokenizer

        return read_hf_tokenizer(place.path, self._hf_options)

    def load_images(self, name: str, model: LanguageModel, tokenizer: TextTokenizer) -> ImageReader | None:
        """How a model, loaded by this name, reads images; None: it reads text only."""
        place = self._locate(name)
        if place.backend == "native":
            return None
        from foredraft.models.hf.load import load_hf_images
        from foredraft.models.hf.model import HFModel
        from foredraft.models.hf.parallel import ParallelModel, refuse_images

        if isinstance(model, ParallelModel):
            return refuse_images(model, tokenizer)
        if not isinstance(model, HFModel):
            raise TypeError(f"{name} is of another backend")
        return load_hf_images(place.path, self._hf_options, model, tokenizer)

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
        self,
        name: str,
        size: int,
        *,
        max_model_len: int | None = None,
        quantize: Quantize | None = None,
        fixed_rows: int = 0,
    ) -> LanguageModel:
        options, place = self._options, self._locate(name)
        if place.backend == "hf":
            self._require_hf(place)
            from foredraft.models.hf.load import load_hf_model
            from foredraft.models.hf.parallel import load_parallel_model

            settings: dict[str, Any] = {
                "fixed_rows": fixed_rows,
                "max_model_len": max_model_len,
                "max_num_seqs": options.max_num_seqs,
                "kv_cache_tokens": options.kv_cache_tokens,
            }
            if size == 1:
                return load_hf_model(place.path, self._hf_options, **settings)
            self._shared_out.append(load_parallel_model(place.path, self._hf_options, size, **settings))
            return self._shared_out[-1]
        model = load_model(
            place.path,
            pool=self._pool,
            max_model_len=max_model_len,
            kv_cache_dtype=options.kv_cache_dtype,
            max_num_seqs=options.max_num_seqs,
            kv_cache_tokens=options.kv_cache_tokens,
            quantize=quantize,
            kernels=options.kernels,
            progress=self._named(f"repacking {model_name(place.path)}"),
        )
        self.memory_plans.append(model.memory_plan)
        return model

    def _locate_target(self, name: str) -> _Place:
        options = self._options
        return self._locate(name, prefer_folder=options.quantize != "auto" or options.tensor_parallel_size > 1)

    def _locate(self, name: str, prefer_folder: bool = False) -> _Place:
        """Pulls what is not on disk."""
        if name not in self._places:
            self._places[name] = self._decide(name, prefer_folder or bool(self._options.wish_of_transformers()))
        return self._places[name]

    def _decide(self, name: str, prefer_folder: bool) -> _Place:
        path = os.path.expanduser(name)
        if not _is_folder(path):
            if self._options.backend == "hf" and is_hub_id(name):
                return _Place("hf", str(find_folder(name) or name), reason="backend is hf")
            path = str(self._find(name, prefer_folder))
            if not _is_folder(path):
                return _Place("native", path)
        reason = self._why_not_native(path)
        if not reason:
            return _Place("native", path, is_folder=True)
        logging.getLogger(__name__).info("%s runs by Transformers: %s", name, reason)
        return _Place("hf", path, is_folder=True, reason=reason)

    def _why_not_native(self, folder: str, with_weights: bool = True) -> str:
        """Empty where the core runs a folder. Raises UnsupportedModelError where it cannot, and has to."""
        options = self._options
        if options.backend == "hf":
            return "backend is hf"
        if options.backend == "auto" and (wish := options.wish_of_transformers()):
            return f"only Transformers knows {wish}"
        if options.backend == "auto" and not self.has_core:
            return "the C++ core is not built"
        try:
            load_core()
            sees = (Checkpoint(folder) if with_weights else read_description(folder)).sees
            check_tokenizer(folder)
        except UnsupportedModelError as error:
            if options.backend == "native":
                raise UnsupportedModelError(f"{error}; Transformers may: --backend hf") from None
            return str(error)
        return "only Transformers reads images" if sees and options.backend == "auto" else ""

    def _check_folder(self, folder: Path) -> None:
        """Before its weights are fetched: what can be told from settings alone. Raises as loading it would."""
        if reason := self._why_not_native(str(folder), with_weights=False):
            self._require_hf(_Place("hf", str(folder), is_folder=True, reason=reason))

    def _check_size(self, field: str, size: int, name: str) -> None:
        if size > 1 and self._locate(name).backend == "native":
            raise ParameterError(
                field,
                f"above 1 is for models of Transformers, and {name} runs on the CPU core, in one process on all "
                "threads: leave it out, or give a folder of Transformers",
            )

    def _is_for_transformers(self, name: str) -> bool:
        return _is_folder(os.path.expanduser(name)) or is_hub_id(name)

    def _require_hf(self, place: _Place) -> None:
        try:
            require_hf()
        except MissingExtraError as error:
            raise MissingExtraError(f"{place.reason}, and Transformers needs an extra: {error}") from None

    def _find(self, name: str, prefer_folder: bool) -> Path:
        load_core()  # nothing is pulled in vain
        progress = self._named(f"pulling {name}")
        return resolve(name, progress, prefer_folder=prefer_folder, check=self._check_folder)

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
            enforce_eager=options.enforce_eager,
        )


def _is_folder(path: str) -> bool:
    """Whether it is one of Transformers."""
    return Path(path, CONFIG).is_file()
