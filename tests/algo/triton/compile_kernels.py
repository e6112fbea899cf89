"""Compile every kernel for GPUs that need not be here, and print the names. Runs outside Triton's interpreter.

python -m tests.algo.triton.compile_kernels
"""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from foredraft.algo.triton import laws, noise, verdicts

TARGETS = [GPUTarget("cuda", 80, 32), GPUTarget("hip", "gfx942", 64)]
REAL, WHOLE, SINGLE, INT32 = "*fp64", "*i64", "*fp32", "*i32"
KEYS = noise.Keys(WHOLE, WHOLE, WHOLE, WHOLE)  # type: ignore[arg-type]
FILTERS = laws.Filters(REAL, REAL, WHOLE, REAL)  # type: ignore[arg-type]
TESTS = verdicts._Tests(REAL, REAL, REAL, REAL, REAL)  # type: ignore[arg-type]
#: What is no float64 tensor and no integer, by argument.
TYPES: dict[str, Any] = {
    "keys": KEYS, "filters": FILTERS, "tests": TESTS, "logits": SINGLE, "probs": SINGLE,
    "token": INT32, "best_token": INT32, "verdicts": INT32,
    **dict.fromkeys(("index", "first_row", "num_tokens", "draft_token", "draft_parent"), WHOLE),
    **dict.fromkeys(("vocab", "width", "stride", "count", "num_blocks", "q_blocks", "verdict_size"), "i32"),
}  # fmt: skip
SIZES = {"BLOCK": 2048, "NUM_BLOCKS": 128, "Q_BLOCKS": 128, "NODES": 16}
FLAGS = ("BY_MASS", "BY_BLOCK")


def main() -> None:
    for module in (noise, laws, verdicts):
        kernels = [
            k for name, k in vars(module).items() if isinstance(k, triton.JITFunction) and is_kernel(name, module)
        ]
        for kernel in kernels:
            for flag in (False, True) if set(FLAGS) & set(kernel.arg_names) else (False,):
                for target in TARGETS:
                    compile_kernel(kernel, flag, target)
            print(kernel.fn.__name__)


def is_kernel(name: str, module: Any) -> bool:
    """Whether the host launches it, as its source shows: name[grid](...)."""
    return f"    {name}[" in open(module.__file__, encoding="utf-8").read()


def compile_kernel(kernel: Any, flag: bool, target: GPUTarget) -> None:
    fixed = {**SIZES, **dict.fromkeys(FLAGS, flag)}
    signature = {name: "constexpr" if name in fixed else TYPES.get(name, REAL) for name in kernel.arg_names}
    constants = {(i,): fixed[name] for i, name in enumerate(kernel.arg_names) if name in fixed}
    source = ASTSource(kernel, signature=signature, constexprs=constants)
    triton.compile(source, target=target, options=dict(noise.EXACT))


if __name__ == "__main__":
    main()
