"""The interpreter runs what no compiler has seen: here the compilers of NVIDIA's and AMD's GPUs do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
KERNELS = [
    "_draw_uniforms", "_find_best", "_weigh", "_keep_likeliest", "_race", "_walk", "_sum_blocks", "_compare",
    "_sum_excess", "_judge",
]  # fmt: skip


def test_every_kernel_compiles(tmp_path: Path):
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": paths, "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "tests.algo.triton.compile_kernels"]
    run = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    assert run.stdout.split() == KERNELS
