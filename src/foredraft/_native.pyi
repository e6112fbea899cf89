"""The C++ core. Arrays are C-contiguous numpy arrays of exactly the stated type; wrong values raise ValueError."""

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from foredraft.types import Draft, TokenLogprob, Verdict

# ── decoder ──────────────────────────────────────────────────────────────────────────────────────────────────────────

def default_threads() -> int:
    """Processors this process may use: affinity mask and cgroup quota (v1, v2), at least 1."""

class ThreadPool:
    """Threads that share the work of a pass. The calling thread is one of them. Target and drafts may share a pool."""

    def __init__(self, num_threads: int) -> None: ...
    @property
    def num_threads(self) -> int: ...

class KVCache:
    """Keys and values of every layer in blocks of 32 slots. Memory is taken as slots are written."""

    @property
    def num_blocks(self) -> int: ...
    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""

class Decoder:
    """A decoder-only transformer driven by a description. One pass at a time.

    Norms after attention and feed-forward, norms of queries and keys, and biases apply where their vectors are set.
    """

    def __init__(
        self,
        pool: ThreadPool,
        *,
        num_layers: int,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        ffn_size: int,
        vocab_size: int,
        norm_eps: float,
        attention_scale: float,
        rope_tables: Sequence[tuple[NDArray[np.float64], float]],
        layer_rope: Sequence[int],
        layer_window: Sequence[int],
        rope_interleaved: bool,
        activation: Literal["silu", "gelu_tanh"] = "silu",
        attention_softcap: float = 0.0,
        logit_softcap: float = 0.0,
        embedding_scale: float = 1.0,
        kernel_set: str | None = None,
    ) -> None:
        """`rope_tables`: 1 or 2 pairs (inverse frequencies [head_dim / 2], factor on cos and sin).

        `layer_rope` [num_layers]: table of each layer. `layer_window` [num_layers]: positions each layer sees, the
        row's own included; 0 sees all. Soft-caps of 0 are off. hidden_size, ffn_size and num_heads * head_dim are
        multiples of 32, head_dim of 16.
        """

    @property
    def kernel_set(self) -> str: ...
    @property
    def weight_bytes(self) -> int:
        """Bytes of the packed matrices, which one pass reads."""

    def set_weight(self, name: str, format: str, n: int, k: int, packed: NDArray[np.uint8]) -> None:
        """Refers to the array, does not copy. GGUF names: blk.{i}.attn_{q,k,v,output}.weight,
        blk.{i}.ffn_{gate,up,down}.weight, output.weight (the head; a tied model passes its packed embedding here)."""

    def set_vector(self, name: str, values: NDArray[np.float32]) -> None:
        """Copies. GGUF names: output_norm.weight, blk.{i}.{attn_norm,ffn_norm,post_attention_norm,post_ffw_norm,
        attn_q_norm,attn_k_norm}.weight, blk.{i}.attn_{q,k,v,output}.bias."""

    def set_embedding(self, ggml_type: int, vocab: int, hidden: int, data: NDArray[np.uint8]) -> None:
        """The token embedding as it lies in the GGUF file; rows are dequantised when used. Refers to the array."""

    def make_cache(self, num_blocks: int, half: bool) -> KVCache:
        """fp16 if `half`, else float32."""

    def forward(
        self,
        cache: KVCache,
        sequences: NDArray[np.int32],
        block_tables: NDArray[np.int32],
        tokens: NDArray[np.int32],
        parents: NDArray[np.int32] | None = None,
        hidden_layers: Sequence[int] = (),
        embedding_rows: NDArray[np.int32] | None = None,
        embeddings: NDArray[np.float32] | None = None,
    ) -> NDArray[np.float32]:
        """One pass over all rows of all sequences. Returns logits [sum of num_logits, vocab_size], valid till the next.

        `sequences` [num_sequences, 4]: start, num_rows, num_logits, num_table_blocks.
        `block_tables`: the sequences' tables, one after another.
        `tokens` [rows]. `parents` [rows], indices within the row's own sequence, -1: the committed text; None: chains.
        `embedding_rows` [e], `embeddings` [e, hidden]: rows that take these instead of their token's (already scaled).
        `hidden_layers`: i < num_layers is the input of layer i, num_layers the output of the last, before its norm.
        """

    def hidden_states(self) -> NDArray[np.float32]:
        """[len(hidden_layers), rows, hidden] of the last pass, valid until the next."""

    def profile(self) -> dict[str, float]:
        """Seconds that the stages of the last pass took, summed over layers.

        embed, norm, projections, rotate, attention, output, gate_up, down, head. Stages that read weights: projections,
        output, gate_up, down, head.
        """

    def move_slots(
        self, cache: KVCache, block_table: NDArray[np.int32], source: NDArray[np.int32], target: NDArray[np.int32]
    ) -> None:
        """Copies slots in order; source[i] >= target[i], both ascending."""

    def limit_head(self, blocks: NDArray[np.int32] | None) -> None:
        """Compute logits only of the listed blocks of 16 tokens (ascending), -inf elsewhere. None: all."""

# ── sampling ─────────────────────────────────────────────────────────────────────────────────────────────────────────

class Sampler:
    """`foredraft.algo.sampler.Sampler` for float32 rows in C order; `make_sampler` makes one. One thread at a time."""

    def __init__(
        self,
        *,
        vocab_size: int,
        prompt: Sequence[int],
        seed: int,
        choice: int,
        block: bool,
        vocab_limit: int,
        kernel_set: str | None,
        eos_ids: Sequence[int],
        temperature: float,
        top_p: float,
        top_k: int,
        min_p: float,
        min_tokens: int,
        presence_penalty: float,
        frequency_penalty: float,
        repetition_penalty: float,
        logit_bias: Mapping[int, float],
    ) -> None: ...
    def extend(self, tokens: Sequence[int]) -> None: ...
    def draw(
        self,
        logits: NDArray[np.float32],
        path: Sequence[int],
        probs: NDArray[np.float32] | None,
        mask: NDArray[np.uint32] | None = None,
    ) -> tuple[int, float]: ...
    def runners_up(
        self,
        logits: NDArray[np.float32],
        path: Sequence[int],
        count: int,
        least_odds: float,
        mask: NDArray[np.uint32] | None = None,
    ) -> list[tuple[int, float]]: ...
    def verify(self, logits: NDArray[np.float32], draft: Draft, masks: NDArray[np.uint32] | None = None) -> Verdict: ...
    def logprobs(self, logits: NDArray[np.float32], token: int, num_top: int) -> TokenLogprob: ...

# ── kernels and packed weights ───────────────────────────────────────────────────────────────────────────────────────

def kernel_sets() -> list[str]:
    """Kernel sets that this processor can run, best first; `portable` is always there. All give the same bits."""

def packed_format(ggml_type: int) -> str:
    """Packed format that holds a GGUF tensor type's own numbers: F32 F16 BF16 Q4S Q4A Q5S Q5A Q8S Q4K Q5K Q6K."""

def packed_bytes(format: str, n: int, k: int) -> int:
    """Bytes of a packed matrix of n outputs by k inputs. k: any (floats), a multiple of 32, of 256 (K-quants)."""

def pack(
    format: str,
    ggml_type: int,
    n: int,
    k: int,
    src: NDArray[np.uint8],
    dst: NDArray[np.uint8],
    block_begin: int = 0,
    block_end: int = -1,
) -> None:
    """Packs blocks of 16 rows of a stored [n, k] matrix into dst, which holds the whole packed matrix.

    Exact when format is packed_format(ggml_type); F32, Q4A and Q8S are also reached from any type by rounding.
    Releases the GIL: threads may pack different blocks of one matrix.
    """

def dequantize(ggml_type: int, src: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Stored elements as floats, the numbers that the `gguf` package gives. [count]"""

def matmul(
    set_name: str, format: str, n: int, k: int, packed: NDArray[np.uint8], x: NDArray[np.float32]
) -> NDArray[np.float32]:
    """x [rows, k] times the packed matrix: [rows, n]. One thread; for tests and checks."""

def time_matmul(
    set_name: str, format: str, n: int, k: int, rows: int, threads: int, copies: int, repeats: int
) -> list[float]:
    """Seconds of one product, a figure a repeat; each walks over `copies` matrices so that no cache holds them."""

def time_reading(bytes: int, threads: int, repeats: int) -> list[float]:
    """Bytes a second of plain reading, a figure a repeat."""

# ── model files ──────────────────────────────────────────────────────────────────────────────────────────────────────

class GgufMalformed(Exception):
    """Not a well-formed file; the message is one line."""

class GgufUnsupported(Exception):
    """Well-formed, but of a version or with a tensor type that is not read; the message is one line."""

def sentencepiece_merges(tokens: list[str], scores: list[float]) -> list[tuple[str, str]]:
    """Every way to put a token together from two, the best score of the whole first. `tokens` are distinct.

    Of equal scores the earlier token comes first, then the shorter left part. Tokens with lone surrogates take no part.
    """

class GgufFile:
    """A GGUF file, mapped read-only; its header has been checked. Raises OSError, GgufMalformed, GgufUnsupported."""

    def __init__(self, path: bytes) -> None: ...
    @property
    def version(self) -> int: ...
    @property
    def alignment(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    def keys(self) -> list[str]: ...
    def value(self, index: int) -> bool | int | float | str | list[bool] | list[int] | list[float] | list[str]:
        """The value of `keys()[index]`, made anew."""

    def tensors(self) -> list[tuple[str, str, tuple[int, ...], int, int]]:
        """Name, ggml type, shape with the fastest axis first, offset from the start of the file, bytes."""

    def view(self, offset: int, count: int) -> NDArray[np.uint8]:
        """Bytes of the file, read-only, not copied."""

    def drop_pages(self, offset: int, count: int) -> None:
        """Gives the memory of whole pages in a range back; they are read again when touched."""
