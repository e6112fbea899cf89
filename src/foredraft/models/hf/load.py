"""From a folder or hub id of Transformers to a model that runs."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast, get_args

import torch
import transformers
from transformers.distributed.configuration_utils import DistributedConfig

from foredraft.algo.sampler import SamplerKind
from foredraft.errors import ForedraftError, ModelFileError, ParameterError, UnsupportedModelError
from foredraft.models.base import ImageReader, TextTokenizer
from foredraft.models.fast_tokenizer import FastTokenizer
from foredraft.models.folder.tokenizer import check_ends
from foredraft.models.hf.checks import context_length
from foredraft.models.hf.graphs import choose_capture
from foredraft.models.hf.model import HFModel
from foredraft.models.hf.packing import pack_for_good
from foredraft.models.hf.probe import probe_once
from foredraft.models.hf.processor import HFImageReader, NoImages, ProcessorLoader, check_reader
from foredraft.models.hf.tokenizer import make_tokenizer
from foredraft.models.load import count_blocks
from foredraft.types import check_choice

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "auto": "auto"}
#: More would be built one by one until memory is gone.
MAX_LAYERS = 10_000
#: Context of a model that sets no limit, unless the caller does.
DEFAULT_CONTEXT = 8192


@dataclass(frozen=True, slots=True)
class HFOptions:
    """How Transformers loads and runs models.

    device: where the model is, for example "cuda:1"; None takes the first GPU if there is one. device_map: spread it
    over several devices as `accelerate` does ("auto"), instead. dtype: "auto" takes the checkpoint's. threads: None
    leaves torch's own. enforce_eager: no CUDA graphs.
    """

    device: str | None = None
    device_map: str | None = None
    dtype: str = "auto"
    trust_remote_code: bool = False
    threads: int | None = None
    enforce_eager: bool = False


def load_hf_model(
    name: str,
    options: HFOptions,
    *,
    max_model_len: int | None = None,
    max_num_seqs: int = 1,
    kv_cache_tokens: int | None = None,
    fixed_rows: int = 0,
    tensor_parallel_size: int = 1,
) -> HFModel:
    """Load a model of Transformers from a folder or the hub.

    max_model_len: None takes what its positions reach. kv_cache_tokens: what the cache holds, all sequences together;
    None has room for max_num_seqs sequences within limits. fixed_rows: see `HFModel`. tensor_parallel_size: of the
    group that this process is a member of, all of which load the model together (see `parallel.py`).

    Raises ModelFileError, UnsupportedModelError, ParameterError.
    """
    if options.dtype not in _DTYPES:
        raise ParameterError("dtype", f"must be one of {', '.join(_DTYPES)}")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    arguments: dict[str, Any] = {"dtype": _DTYPES[options.dtype]}
    if tensor_parallel_size > 1:
        arguments["distributed_config"] = DistributedConfig(tp_size=tensor_parallel_size)
    elif options.device_map is not None:
        arguments["device_map"] = options.device_map
    model = _from_pretrained(_model_class(name, options), name, options, arguments).eval()
    if tensor_parallel_size == 1 and options.device_map is None:
        model = _moved(model, options.device or _default_device())
    length = max_model_len or context_length(model) or DEFAULT_CONTEXT
    short_name = Path(name).name or name
    device = model.device
    pack_for_good(model)
    probe_once(model, name=short_name)
    runner = HFModel(
        model,
        name=short_name,
        num_blocks=count_blocks(kv_cache_tokens, length, max_num_seqs),
        max_model_len=length,
        fixed_rows=fixed_rows,
        device_sampler=choose_device_sampler(device),
        packed=True,
        capture=choose_capture(model, enforce_eager=options.enforce_eager),
    )
    runner.capture_usual()
    return runner


def read_hf_tokenizer(name: str, options: HFOptions) -> FastTokenizer:
    """The tokenizer of a folder or hub id, with the ends of text that the model's settings name.

    Raises ModelFileError, UnsupportedModelError.
    """
    tokenizer = _from_pretrained(transformers.AutoTokenizer, name, options, {})
    if tokenizer.chat_template is None:
        tokenizer.chat_template = _template_of_processor(name)
    try:
        ends = transformers.GenerationConfig.from_pretrained(name, local_files_only=_is_offline()).eos_token_id
    except OSError:  # the model has no such file
        ends = None
    return make_tokenizer(tokenizer, check_ends(ends, name))


def choose_device_sampler(device: torch.device) -> SamplerKind | None:
    """What reads the rows of a model on `device` there; None: they are brought to the CPU.

    Triton's kernels on a GPU, if Triton is installed. FOREDRAFT_SAMPLER=triton, =array (the reference) or =native
    (on the CPU) chooses by hand. Raises ParameterError for other names.
    """
    forced = os.environ.get("FOREDRAFT_SAMPLER") or None
    if forced is None:
        return "triton" if device.type == "cuda" and find_spec("triton") is not None else None
    check_choice("FOREDRAFT_SAMPLER", forced, get_args(SamplerKind))
    return None if forced == "native" else cast(SamplerKind, forced)


def load_hf_images(name: str, options: HFOptions, model: HFModel, tokenizer: TextTokenizer) -> ImageReader | None:
    """How a model reads images; None for one of text. What cannot be carried exactly is refused by the reader."""
    if not model.can_see:
        return None
    try:
        if find_spec("PIL") is None:
            raise UnsupportedModelError("Pillow is not installed")
        processor = _from_pretrained(ProcessorLoader(model.transformers_model.config), name, options, {})
        reader = HFImageReader(processor, tokenizer)
        check_reader(model.transformers_model, reader, tokenizer, model.name)
    except torch.OutOfMemoryError:
        raise
    except (ForedraftError, RuntimeError, ValueError, TypeError) as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        return NoImages(f"this model takes none here: {reason}", tokenizer)
    return reader


def read_config(name: str, options: HFOptions) -> Any:
    """Raises ModelFileError, UnsupportedModelError."""
    config = _from_pretrained(transformers.AutoConfig, name, options, {})
    num_layers = getattr(config.get_text_config(decoder=True), "num_hidden_layers", 0)
    if isinstance(num_layers, int) and num_layers > MAX_LAYERS:
        raise ModelFileError(f"{name}: config.json says {num_layers} layers, and no model has more than {MAX_LAYERS}")
    return config


def _model_class(name: str, options: HFOptions) -> Any:
    config = read_config(name, options)
    sees = type(config) in transformers.AutoModelForImageTextToText._model_mapping
    return transformers.AutoModelForImageTextToText if sees else transformers.AutoModelForCausalLM


def _template_of_processor(name: str) -> str | None:
    """Repositories of models that see may keep it beside the processor."""
    try:
        settings, _ = transformers.ProcessorMixin.get_processor_dict(name, local_files_only=_is_offline())
    except OSError:
        return None
    template = settings.get("chat_template")
    return template.get("default") if isinstance(template, dict) else template


def _from_pretrained(factory: Any, name: str, options: HFOptions, arguments: dict[str, Any]) -> Any:
    _hide_bars()
    try:
        return factory.from_pretrained(
            name, trust_remote_code=options.trust_remote_code, local_files_only=_is_offline(), **arguments
        )
    except (torch.OutOfMemoryError, MemoryError):
        raise
    except Exception as error:  # whatever damaged files make of the library
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        if "trust_remote_code" in reason:
            raise UnsupportedModelError(
                f"{name} brings code of its own; if you trust it, allow it with --trust-remote-code"
            ) from None
        raise ModelFileError(f"{name} cannot be loaded by Transformers: {reason}") from None


def _hide_bars() -> None:
    """The library's bars would run through the command's own."""
    logging: Any = transformers.utils.logging
    logging.disable_progress_bar()


def _moved(model: Any, device: str) -> Any:
    try:
        return model.to(device)
    except (RuntimeError, AssertionError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ParameterError("device", f"{device!r} cannot be used: {reason}") from None


def _default_device() -> str:
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def _is_offline() -> bool:
    return os.environ.get("FOREDRAFT_OFFLINE", "0") not in ("", "0")
