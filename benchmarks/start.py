"""How long a start takes when the weights have been repacked before: in fresh processes, part by part.

python benchmarks/start.py qwen2.5-coder-1.5b
python benchmarks/start.py --command "foredraft demo"
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from statistics import median
from time import monotonic  # the same clock in all processes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="time the parts of its start")
    parser.add_argument("--command", help="time a whole command")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--child", type=float, metavar="BEGAN", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        print(json.dumps(start(args.model, args.child)))
    elif args.command:
        times = [time_command(shlex.split(args.command)) for _ in range(args.repeats + 1)][1:]
        print(f"{args.command}: {median(times):.2f} s ({min(times):.2f} .. {max(times):.2f})")
    else:
        runs = [time_start(args.model) for _ in range(args.repeats + 1)][1:]
        for part in runs[0]:
            times = [run[part] for run in runs]
            print(f"{part:40} {1e3 * median(times):7.0f} ms ({1e3 * min(times):.0f} .. {1e3 * max(times):.0f})")


def time_command(command: list[str]) -> float:
    began = monotonic()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return monotonic() - began


def time_start(model: str) -> dict[str, float]:
    """Seconds of each part, and from the start of the process to the first pass and the first token."""
    child = [sys.executable, __file__, model, "--child", repr(monotonic())]
    times: dict[str, float] = json.loads(subprocess.run(child, check=True, capture_output=True).stdout)
    return times


def start(name: str, began: float) -> dict[str, float]:
    """What `LLM` does, in its order, with the clock between."""
    marks = [began, monotonic()]
    from foredraft import LLM, SamplingParams  # noqa: F401 (what a program imports)
    from foredraft.drafters.ngram import NgramDrafter
    from foredraft.engine.generator import Generator
    from foredraft.models.base import Rows
    from foredraft.models.gguf import load_core, read_gguf
    from foredraft.models.hub import resolve
    from foredraft.models.load import load_model
    from foredraft.models.tokenizer import Tokenizer

    core = load_core()
    import numpy as np

    marks.append(monotonic())
    path = resolve(name)
    model = load_model(path, pool=core.ThreadPool(core.default_threads()), max_model_len=4096)
    marks.append(monotonic())
    tokenizer = Tokenizer(read_gguf(path).metadata)
    marks.append(monotonic())
    model.forward([Rows(np.arange(1, dtype=np.int32), 0, [1])])
    marks.append(monotonic())
    generator = Generator(model, tokenizer, [NgramDrafter()])
    marks.append(monotonic())
    prompt = generator.render_chat([{"role": "user", "content": "Name three primes."}])
    generator.generate(prompt, SamplingParams(temperature=0, max_tokens=1))
    marks.append(monotonic())
    parts = (
        "python starts", "imports", "weights are mapped", "tokenizer", "first pass", "costs of passes are measured",
        "first token of a short chat",
    )  # fmt: skip
    times = {part: marks[i + 1] - marks[i] for i, part in enumerate(parts)}
    return times | {"process start to first pass": marks[5] - began, "process start to first token": marks[7] - began}


if __name__ == "__main__":
    main()
