"""From a GGUF file or a folder to a model that runs: read, check, repack or map, hand over to the core."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from foredraft.errors import ModelFileError, NativeCoreError, ParameterError, UnsupportedModelError
from foredraft.models.architecture import Architecture, read_architecture, tensor_shapes
from foredraft.models.base import BLOCK_SIZE
from foredraft.models.folder.checkpoint import Checkpoint
from foredraft.models.gguf import GGUFFile, load_core, read_gguf
from foredraft.models.hub import packed_directory
from foredraft.models.native import MemoryPlan, NativeModel
from foredraft.models.packed_cache import PackedTensor, PackedWeights, Progress, identify, load_packed
from foredraft.types import MAX_DRAFT, check_choice, check_whole

if TYPE_CHECKING:
    from foredraft._native import Decoder, ThreadPool

#: What holds the tensors of a decoder.
ModelFiles = GGUFFile | Checkpoint
KVCacheDtype = Literal["f16", "f32"]
Quantize = Literal["q4", "q8"]

EMBEDDING, HEAD, ROPE_DIVISORS = "token_embd.weight", "output.weight", "rope_freqs.weight"

#: Numbers of ggml's tensor types, as the core takes them.
GGML_TYPES: Mapping[str, int] = {
    "F32": 0,
    "F16": 1,
    "Q4_0": 2,
    "Q4_1": 3,
    "Q5_0": 6,
    "Q5_1": 7,
    "Q8_0": 8,
    "Q4_K": 12,
    "Q5_K": 13,
    "Q6_K": 14,
    "BF16": 30,
}
#: Packed formats that matrices are requantised to.
_QUANTIZED: Mapping[str, str] = {"q4": "Q4A", "q8": "Q8S"}

#: The pass that `MemoryPlan.scratch` is about: rows of a prompt chunk, and logits of some of them.
SCRATCH_ROWS, SCRATCH_LOGITS = 512, 16
#: Tokens that a cache holds at most unless the caller says so, or one sequence is longer.
MAX_KV_CACHE_TOKENS = 65_536
#: What the core can count.
MAX_CACHE_SLOTS = 2**31 - BLOCK_SIZE


def load_model(
    path: str | os.PathLike[str],
    *,
    pool: ThreadPool,
    max_model_len: int | None = None,
    kv_cache_dtype: KVCacheDtype = "f16",
    max_num_seqs: int = 1,
    kv_cache_tokens: int | None = None,
    quantize: Quantize | None = None,
    kernels: str | None = None,
    progress: Progress | None = None,
    cache: bool = True,
) -> NativeModel:
    """Load a GGUF file, or a folder of Transformers with safetensors, for the CPU core.

    pool: may be shared with other models. max_model_len: None takes the model's own context. kv_cache_tokens: what the
    cache holds, all sequences together; None has room for max_num_seqs sequences of max_model_len and a draft each, but
    no more than MAX_KV_CACHE_TOKENS if one fits in these; memory is taken as it fills. quantize: None keeps the file's
    own numbers; "q4" (4 bits, scale and minimum per 32 inputs) or "q8" (8 bits, a scale) rounds every matrix. kernels:
    a kernel set by name; None takes the best one that runs here. progress: called with packed bytes done and in all,
    while weights are repacked, which happens on a model's first start. cache: keep repacked weights on disk.

    Raises ModelFileError, UnsupportedModelError, ParameterError, NativeCoreError.
    """
    core = load_core()
    file, arch = open_model(path)
    try:
        tensors = plan_tensors(file, arch, quantize)
    except (ModelFileError, UnsupportedModelError) as error:
        raise type(error)(f"{file.path}: {error}") from None
    max_model_len = _check_length(max_model_len, arch.context_length)
    check_choice("kv_cache_dtype", kv_cache_dtype, ("f16", "f32"))
    num_blocks = count_blocks(kv_cache_tokens, max_model_len, max_num_seqs)

    decoder = make_decoder(core, arch, file, pool, kernels)
    weights = _pack_weights(core, file, tensors, quantize, pool.num_threads, progress, cache)
    _set_weights(core, decoder, arch, file, tensors, weights)
    kv_cache = decoder.make_cache(num_blocks, kv_cache_dtype == "f16")
    plan = MemoryPlan(
        file=file.nbytes,
        packed_weights=weights.nbytes,
        packed_in=weights.where,
        kv_per_token=arch.kv_bytes_per_token(2 if kv_cache_dtype == "f16" else 4),
        kv_reserved=num_blocks * kv_cache.block_bytes,
        scratch=scratch_bytes(arch, SCRATCH_ROWS, SCRATCH_LOGITS),
    )
    head_bytes = next(tensor.nbytes for tensor in tensors if tensor.name == HEAD)
    return NativeModel(model_name(path), arch, decoder, kv_cache, max_model_len, head_bytes, plan)


def open_model(path: str | os.PathLike[str]) -> tuple[ModelFiles, Architecture]:
    """The tensors of a GGUF file or of a folder, and what they make up. Raises as `load_model`."""
    if os.path.isdir(path):
        checkpoint = Checkpoint(path)
        return checkpoint, checkpoint.architecture
    file = read_gguf(path)
    try:
        return file, read_architecture(file.metadata, file.tensors)
    except (ModelFileError, UnsupportedModelError) as error:
        raise type(error)(f"{file.path}: {error}") from None


def model_name(path: str | os.PathLike[str]) -> str:
    """What a file or folder is called, the file without .gguf."""
    path = Path(path).absolute()
    return path.stem if path.suffix == ".gguf" else path.name


def plan_tensors(file: ModelFiles, arch: Architecture, quantize: Quantize | None = None) -> list[PackedTensor]:
    """The matrices that a pass multiplies by, the head last: its own, or the embedding matrix where they are tied.

    Raises UnsupportedModelError for a tensor type that the core cannot read, ParameterError for an unknown `quantize`.
    """
    core = load_core()
    if quantize is not None:
        check_choice("quantize", quantize, tuple(_QUANTIZED))
    tensors = []
    for source in [name for name in tensor_shapes(arch) if name != EMBEDDING] + [EMBEDDING] * arch.tied_head:
        info = file.tensors[source]
        if len(info.shape) != 2:
            continue
        k, n = info.shape
        format = core.packed_format(_ggml_type(file, source)) if quantize is None else _QUANTIZED[quantize]
        name = HEAD if source == EMBEDDING else source
        tensors.append(PackedTensor(name, source, format, n, k, core.packed_bytes(format, n, k)))
    return tensors


def make_decoder(core: Any, arch: Architecture, file: ModelFiles, pool: ThreadPool, kernels: str | None) -> Decoder:
    """A decoder of the core without weights. `kernels` None: FOREDRAFT_KERNELS, or the best set that runs here."""
    kernels = kernels or os.environ.get("FOREDRAFT_KERNELS") or None
    divisors = _vector(core, file, ROPE_DIVISORS) if arch.rope_divisors else None
    tables = [(arch.rope.frequencies(arch.head_dim, divisors), 1.0)]
    if arch.local_rope is not None:
        tables.append((arch.local_rope.frequencies(arch.head_dim), 1.0))
    local = [arch.is_local(layer) for layer in range(arch.num_layers)]
    try:
        decoder: Decoder = core.Decoder(
            pool,
            num_layers=arch.num_layers,
            hidden_size=arch.hidden_size,
            num_heads=arch.num_heads,
            num_kv_heads=arch.num_kv_heads,
            head_dim=arch.head_dim,
            ffn_size=arch.intermediate_size,
            vocab_size=arch.vocab_size,
            norm_eps=arch.norm_eps,
            attention_scale=arch.attention_scale,
            rope_tables=tables,
            layer_rope=[int(is_local and arch.local_rope is not None) for is_local in local],
            layer_window=[arch.sliding_window if is_local else 0 for is_local in local],
            rope_interleaved=arch.rope_interleaved,
            activation=arch.activation,
            attention_softcap=arch.attention_softcap,
            logit_softcap=arch.logit_softcap,
            embedding_scale=arch.embedding_scale,
            kernel_set=kernels,
        )
    except ValueError as error:
        if kernels is None:
            raise
        raise NativeCoreError(str(error)) from None
    return decoder


def scratch_bytes(arch: Architecture, rows: int, num_logits: int) -> int:
    """Roughly what a pass over so many rows allocates: activations as floats and as int8 codes, and the logits."""
    heads = (arch.num_heads + 2 * arch.num_kv_heads) * arch.head_dim
    per_row = 4 * (4 * arch.hidden_size + 2 * heads + 3 * arch.intermediate_size) + 2 * arch.intermediate_size
    return rows * per_row + 4 * num_logits * arch.vocab_size


def _pack_weights(
    core: Any,
    file: ModelFiles,
    tensors: Sequence[PackedTensor],
    quantize: Quantize | None,
    num_threads: int,
    progress: Progress | None,
    cache: bool,
) -> PackedWeights:
    def pack(tensor: PackedTensor, packed: NDArray[np.uint8]) -> None:
        source = file.data(tensor.source)
        core.pack(tensor.format, _ggml_type(file, tensor.source), tensor.n, tensor.k, source, packed)
        file.drop_pages(tensor.source)

    origin = identify(file.path, file.parts(), quantize)
    directory = packed_directory() if cache else None
    return load_packed(directory, origin, tensors, pack, num_threads, progress)


def _set_weights(
    core: Any,
    decoder: Decoder,
    arch: Architecture,
    file: ModelFiles,
    tensors: Sequence[PackedTensor],
    weights: PackedWeights,
) -> None:
    for tensor in tensors:
        decoder.set_weight(tensor.name, tensor.format, tensor.n, tensor.k, weights.tensors[tensor.name])
    for name, shape in tensor_shapes(arch).items():
        if len(shape) == 1 and name != ROPE_DIVISORS:
            decoder.set_vector(name, _vector(core, file, name))
    embedding = file.data(EMBEDDING)
    decoder.set_embedding(_ggml_type(file, EMBEDDING), arch.vocab_size, arch.hidden_size, embedding)


def _vector(core: Any, file: ModelFiles, name: str) -> NDArray[np.float32]:
    vector: NDArray[np.float32] = core.dequantize(_ggml_type(file, name), file.data(name))
    return vector


def _ggml_type(file: ModelFiles, name: str) -> int:
    type = file.tensors[name].type
    if type not in GGML_TYPES:
        raise UnsupportedModelError(f"tensor {name} is {type}; supported types are {', '.join(GGML_TYPES)}")
    return GGML_TYPES[type]


def _check_length(max_model_len: int | None, context_length: int) -> int:
    if max_model_len is None:
        return context_length
    check_whole("max_model_len", max_model_len, 1)
    if max_model_len > context_length:
        raise ParameterError("max_model_len", f"must be at most the model's context of {context_length} tokens")
    return max_model_len


def count_blocks(kv_cache_tokens: int | None, max_model_len: int, max_num_seqs: int) -> int:
    """Blocks of the cache."""
    check_whole("max_num_seqs", max_num_seqs, 1)
    if kv_cache_tokens is None:
        alone = -(-(max_model_len + MAX_DRAFT) // BLOCK_SIZE)
        if alone * BLOCK_SIZE > MAX_CACHE_SLOTS:
            raise ParameterError("max_model_len", f"must be at most {MAX_CACHE_SLOTS - MAX_DRAFT}: no cache holds more")
        return max(alone, min(max_num_seqs * alone, MAX_KV_CACHE_TOKENS // BLOCK_SIZE))
    check_whole("kv_cache_tokens", kv_cache_tokens, BLOCK_SIZE, MAX_CACHE_SLOTS)
    return kv_cache_tokens // BLOCK_SIZE
