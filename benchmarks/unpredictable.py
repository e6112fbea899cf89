"""What speculation costs where nothing can be predicted: seeded noise, and lists of random numbers, names and letters.

Plain and speculative decoding take turns. The seed makes them say the same, so both speeds are those of one text.

    python benchmarks/unpredictable.py smollm2-135m ngram
    python benchmarks/unpredictable.py qwen2.5-coder-1.5b ngram,ngram+model:qwen2.5-coder-0.5b
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from statistics import geometric_mean, median

from foredraft import LLM, Completion, SamplingParams

#: What is asked, and at which temperature.
TEXTS = {
    "noise": ("Write anything.", 4.0),
    "letters": ("Write random letters and digits, without blanks, as a very long password.", 1.3),
    "numbers": ("Write 100 random numbers between 0 and 1,000,000, separated by blanks. Only the numbers.", 1.0),
    "words": ("Write 200 random English words that have nothing to do with each other, separated by blanks.", 1.3),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("drafters", help="several are separated by commas")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    print("| drafter | text | plain tok/s | speculative | ratio | of repeats | drafted | accepted | identical |")
    print("|---|---|---|---|---|---|---|---|---|")
    for drafter in args.drafters.split(","):
        ratios = []
        with LLM(args.model, drafter, max_model_len=2048) as llm:
            for text in TEXTS:
                plain, speculative = run(llm, text, args.tokens, args.repeats)
                ratios.append(report(drafter, text, plain, speculative))
        print(f"| {drafter} | all | | | {geometric_mean(ratios):.3f} | | | | |", flush=True)


def run(llm: LLM, text: str, num_tokens: int, num_repeats: int) -> tuple[list[Completion], list[Completion]]:
    """Answers, plain and speculative in turn; each repeat has its own seed. A first pair warms up and is dropped."""
    request, temperature = TEXTS[text]
    prompt = llm.render_chat([{"role": "user", "content": request}])
    plain: list[Completion] = []
    speculative: list[Completion] = []
    for seed in range(num_repeats + 1):
        params = SamplingParams(temperature=temperature, seed=seed, max_tokens=num_tokens, ignore_eos=True)
        turns = [(plain, replace(params, num_speculative_tokens=0)), (speculative, params)]
        for answers, own in turns if seed % 2 else reversed(turns):
            answers += llm.generate(prompt, own)
    return plain[1:], speculative[1:]


def report(drafter: str, text: str, plain: list[Completion], speculative: list[Completion]) -> float:
    """Prints a line; returns the median over repeats of speculative over plain speed."""
    speeds = [median(c.timing.tokens_per_s for c in answers) for answers in (plain, speculative)]
    ratios = sorted(s.timing.tokens_per_s / p.timing.tokens_per_s for p, s in zip(plain, speculative, strict=True))
    drafted = sum(c.speculation.num_draft_tokens for c in speculative) / len(speculative)
    accepted = sum(c.speculation.num_accepted_tokens for c in speculative) / len(speculative)
    is_identical = all(p.token_ids == s.token_ids for p, s in zip(plain, speculative, strict=True))
    print(
        f"| {drafter} | {text} | {speeds[0]:.1f} | {speeds[1]:.1f} | {median(ratios):.3f} | "
        f"{ratios[0]:.3f} .. {ratios[-1]:.3f} | {drafted:.0f} | {accepted:.0f} | {'yes' if is_identical else 'no'} |",
        flush=True,
    )
    return median(ratios)


if __name__ == "__main__":
    main()
