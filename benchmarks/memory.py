"""Peak memory of a second start with a full context, against file size + KV cache + 400 MB.

python benchmarks/memory.py qwen2.5-coder-1.5b
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

from foredraft import LLM, SamplingParams

ALLOWANCE = 400e6


def fill_context(model: str, max_model_len: int) -> None:
    """One request that fills the context; prints the plan's figures and the peak of this process."""
    with LLM(model, "ngram", max_model_len=max_model_len) as llm:
        prompt = [t % 1000 for t in range(max_model_len - 64)]
        llm.generate(prompt, SamplingParams(temperature=0, max_tokens=None, ignore_eos=True))
        plan = llm.memory_plans[0]
        status = Path("/proc/self/status").read_text(encoding="utf-8")
    peak = int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) * 1024
    print(plan.file, plan.kv_per_token * max_model_len, peak)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        fill_context(args.model, args.max_model_len)
        return 0
    command = [sys.executable, __file__, args.model, "--max-model-len", str(args.max_model_len), "--child"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)  # the first start repacks
    second = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    file, kv_cache, peak = map(float, second)
    bound = file + kv_cache + ALLOWANCE
    sizes = {"file": file, "KV cache": kv_cache, "peak": peak, "bound": bound}
    print(", ".join(f"{name} {size / 1e6:.0f} MB" for name, size in sizes.items()))
    return 0 if peak <= bound else 1


if __name__ == "__main__":
    sys.exit(main())
