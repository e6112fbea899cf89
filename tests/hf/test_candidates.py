"""What Transformers asks of its own assisted decoding and prompt lookup, asked of `foredraft.hf.generate`."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import scipy.stats
import torch
import transformers
from transformers import MaxTimeCriteria, StoppingCriteriaList

import foredraft.hf
from foredraft.engine.costs import ROWS, PassCosts
from foredraft.models.base import Rows
from foredraft.models.hf.model import HFModel
from tests.hf.calls import DRAFTERS, count_passes, letter_tokenizer, ours
from tests.models.hf.zoo import EOS, VOCAB, draft, make_model, model, prompts

#: The module: its package has a function of that name.
generate_module = sys.modules["foredraft.hf.generate"]
GREEDY = {"max_new_tokens": 16, "do_sample": False}


def positions_run(target: Any, run: Callable[[], Any]) -> list[torch.Tensor]:
    """[B, Q] of each pass of a call."""
    positions: list[torch.Tensor] = []

    def keep(_: Any, args: Any, kwargs: dict[str, Any]) -> None:
        if "position_ids" in kwargs:  # without them the model is held against itself
            positions.append(kwargs["position_ids"])

    hook = target.register_forward_pre_hook(keep, with_kwargs=True)
    try:
        run()
    finally:
        hook.remove()
    return positions


def lengths_drafted(target: Any, run: Callable[[], Any]) -> list[int]:
    """Rows of each pass but one, of a call over one text."""
    return [positions.shape[1] - 1 for positions in positions_run(target, run)]


PATTERN = [11, 12, 13, EOS, 14, 15]


def recite(_: int, ids: torch.Tensor) -> list[int]:
    """Lets the pattern go on for ever."""
    return [PATTERN[(PATTERN.index(int(ids[-1])) + 1) % len(PATTERN)]]


RECITING = {"input_ids": torch.tensor([PATTERN * 3]), "attention_mask": torch.ones(1, 18, dtype=torch.long)}


def test_a_text_that_goes_on_as_expected_is_accepted_in_whole_drafts() -> None:
    """The tokens that the processors leave are the pattern's: every draft is right to its end."""
    target = model("llama")
    arguments = {**RECITING, "prefix_allowed_tokens_fn": recite, "eos_token_id": None, **GREEDY, "max_new_tokens": 40}
    plain = target.generate(**arguments)
    assert plain[0].tolist() == (PATTERN * 10)[:58]
    options = {"prompt_lookup_num_tokens": 7, "adaptive": False}
    foredraft.hf.generate(target, **arguments, **options)  # the first call holds the model's passes against its own
    got: list[Any] = []
    passes = count_passes(target, lambda: got.append(foredraft.hf.generate(target, **arguments, **options)))
    assert got[0].equal(plain)
    assert passes <= 8  # the prompt, six tokens and the next one a pass, the ends


def test_what_was_looked_up_ends_at_the_end_of_text() -> None:
    """It stands in the midst of an accepted draft; what follows it there is not in the result."""
    target = model("llama")
    arguments = {**RECITING, "prefix_allowed_tokens_fn": recite, **GREEDY}
    got = foredraft.hf.generate(target, **arguments, prompt_lookup_num_tokens=8, adaptive=False)
    assert got[0].tolist() == target.generate(**arguments)[0].tolist() == PATTERN * 3 + PATTERN[:4]


@pytest.mark.parametrize("max_length", range(19, 26))
def test_nothing_is_drafted_past_the_longest_text(max_length: int) -> None:
    target = model("llama")
    arguments = {**RECITING, "prefix_allowed_tokens_fn": recite, "eos_token_id": None, "do_sample": False}
    arguments["max_length"] = max_length
    got: list[Any] = []

    def run() -> None:
        got.append(foredraft.hf.generate(target, **arguments, prompt_lookup_num_tokens=8, adaptive=False))

    assert max(int(p.max()) for p in positions_run(target, run)) < max_length - 1
    assert got[0].equal(target.generate(**arguments))


@pytest.mark.parametrize("adaptive", [False, True])
@pytest.mark.parametrize("length", [1, 2, 5])
def test_drafts_are_as_long_as_was_said(length: int, adaptive: bool) -> None:
    """Never longer; without adaptation never shorter, but at the end of the text."""
    target, assistant = model("llama"), copy.deepcopy(model("llama"))
    options = {"assistant_model": assistant, "num_assistant_tokens": length, "adaptive": adaptive, **GREEDY}
    foredraft.hf.generate(target, **prompts((0,)), **options)  # the first call holds the model's passes against its own
    lengths = lengths_drafted(target, lambda: foredraft.hf.generate(target, **prompts((0,)), **options))
    drafted = [n for n in lengths if n < 10]  # without the prompt
    assert max(drafted) <= length
    if not adaptive:
        assert length in drafted


def test_the_assistants_own_setting_of_the_length_counts() -> None:
    target = make_model("llama")
    assistant = copy.deepcopy(target)
    assistant.generation_config.num_assistant_tokens = 3
    options = {"assistant_model": assistant, "adaptive": False, **GREEDY}
    foredraft.hf.generate(target, **prompts((0,)), **options)
    lengths = lengths_drafted(target, lambda: foredraft.hf.generate(target, **prompts((0,)), **options))
    assert max(n for n in lengths if n < 10) == 3


def test_settings_in_a_generation_config_count() -> None:
    config = transformers.GenerationConfig(prompt_lookup_num_tokens=5, max_matching_ngram_size=20, **GREEDY)
    target = model("llama")
    arguments = {**RECITING, "prefix_allowed_tokens_fn": recite, "generation_config": config}
    before = config.to_dict()
    run = lambda: foredraft.hf.generate(target, **arguments, adaptive=False)  # noqa: E731
    assert max(n for n in lengths_drafted(target, run) if n < 17) == 5
    assert config.to_dict() == before
    several = foredraft.hf.generate(target, **arguments, num_return_sequences=3, do_sample=True)
    assert several.tolist() == [PATTERN * 3 + PATTERN[:4]] * 3  # which Transformers' own drafts refuse


@pytest.mark.parametrize(
    "options",
    [
        {"num_assistant_tokens_schedule": "heuristic"},
        {"num_assistant_tokens_schedule": "heuristic_transient"},
        {"num_assistant_tokens_schedule": "constant"},
        {"assistant_confidence_threshold": 0.9},
        {"cache_implementation": "dynamic"},
        {"cache_implementation": "static"},
        {"use_cache": False},
    ],
    ids=str,
)
def test_settings_of_transformers_own_drafts_leave_the_ids(options: dict[str, Any]) -> None:
    plain = model("llama").generate(**prompts(), **GREEDY)
    assert ours(model("llama"), **prompts(), **GREEDY, **options).equal(plain)


@pytest.mark.parametrize("do_sample", [False, True])
def test_nobodys_settings_are_changed(do_sample: bool) -> None:
    target, assistant = make_model("llama"), make_model("gpt2")
    config = transformers.GenerationConfig(max_new_tokens=8, do_sample=do_sample, eos_token_id=5, stop_strings=["Q"])
    watched = [target.generation_config, target.config, assistant.generation_config, assistant.config, config]
    inputs = prompts()
    tensors = {name: tensor.clone() for name, tensor in inputs.items()}
    weights = [{name: value.clone() for name, value in m.state_dict().items()} for m in (target, assistant)]
    before = [copy.deepcopy(settings.to_dict()) for settings in watched]
    foredraft.hf.generate(
        target, **inputs, generation_config=config, assistant_model=assistant, tokenizer=letter_tokenizer()
    )
    assert [settings.to_dict() for settings in watched] == before
    assert all(inputs[name].equal(tensor) for name, tensor in tensors.items())
    for m, old in zip((target, assistant), weights, strict=True):
        assert all(value.equal(old[name]) for name, value in m.state_dict().items())
    assert target.generate(**inputs, **GREEDY).shape == (4, 27)  # it still decodes by itself


@pytest.mark.parametrize("spec", DRAFTERS)
def test_a_model_that_drafts_for_itself(spec: str) -> None:
    """Every token of its greedy drafts is right; and what it has done in one call leaves nothing for the next."""
    target = model("llama")
    plain = target.generate(**prompts(), **GREEDY)
    for _ in range(2):
        got = foredraft.hf.generate(
            target, **prompts(), **GREEDY, assistant_model=target, num_assistant_tokens=5, adaptive=False
        )
        assert got.equal(plain)
        assert ours(target, spec, **prompts(), **GREEDY).equal(plain)


def test_time_that_is_up_ends_the_text() -> None:
    """A criterion that holds at once ends it after one token, whatever was accepted with it."""
    arguments = {**RECITING, "prefix_allowed_tokens_fn": recite, **GREEDY}
    arguments["stopping_criteria"] = StoppingCriteriaList([MaxTimeCriteria(max_time=-1.0)])
    got = foredraft.hf.generate(model("llama"), **arguments, prompt_lookup_num_tokens=8, adaptive=False)
    assert got.equal(model("llama").generate(**arguments))
    assert got.shape == (1, 19)
    foredraft.hf.generate(model("llama"), **prompts(), max_time=1e-6, max_new_tokens=200)


def test_processors_see_each_text_once_and_leave_the_raw_logits_alone() -> None:
    """A processor that writes into what it is given changes the law of that place only."""

    def write(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        for row, text in enumerate(ids.tolist()):
            scores[row, text[-1] % 7 :: 7] = float("-inf")
        return scores

    arguments = {**prompts(), **GREEDY, "logits_processor": transformers.LogitsProcessorList([write])}
    arguments |= {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    plain, got = model("llama").generate(**arguments), ours(model("llama"), **arguments)
    assert got.sequences.equal(plain.sequences)
    for step in range(16):
        assert bool(torch.isfinite(got.logits[step]).all())
        assert torch.isfinite(got.scores[step]).equal(torch.isfinite(plain.scores[step]))
        assert got.scores[step].equal(got.logits[step].where(torch.isfinite(got.scores[step]), float("-inf")))


@pytest.mark.parametrize("sharpness", [1e-3, 1.0, 30.0], ids=["blind", "unsure", "certain"])
def test_an_assistant_however_wrong_does_not_bend_the_law(sharpness: float) -> None:
    """Its drafts are drawn from a flat law, from another model's, and from one with all mass on a token.

    The third token, the second of a draft, of 1,500 texts against the target's law summed over the two before it.
    """
    target = make_model("llama", vocab_size=8)
    assistant = make_model("llama", seed=3, vocab_size=8)
    with torch.no_grad():
        assistant.get_output_embeddings().weight.mul_(sharpness)
    ids, count = torch.tensor([[3, 4, 5]]), 1500
    torch.manual_seed(5)
    got = foredraft.hf.generate(
        target,
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        top_k=0,
        eos_token_id=None,
        max_new_tokens=3,
        num_return_sequences=count,
        assistant_model=assistant,
        num_assistant_tokens=2,
        adaptive=False,
    )
    seen = torch.bincount(got[:, -1], minlength=8).tolist()
    with torch.no_grad():
        texts = torch.cartesian_prod(torch.arange(8), torch.arange(8))
        texts = torch.cat([ids.expand(64, 3), texts], dim=1)
        laws = target(texts).logits.double().softmax(dim=-1)
    mass = laws[:, 2].gather(1, texts[:, 3:4]) * laws[:, 3].gather(1, texts[:, 4:5])  # [64, 1]
    expected = (mass * laws[:, 4]).sum(dim=0) * count
    likely = expected >= 5
    pooled = [[*(x for x, keep in zip(v, likely, strict=True) if keep)] for v in (seen, expected.tolist())]
    rest = [count - sum(pooled[0]), count - sum(pooled[1])]
    if rest[1] >= 5:
        pooled = [[*values, more] for values, more in zip(pooled, rest, strict=True)]
    else:
        pooled[1] = [value * sum(pooled[0]) / sum(pooled[1]) for value in pooled[1]]
    assert scipy.stats.chisquare(*pooled).pvalue > 1e-3


@pytest.mark.parametrize("num_rows", [1, 3, 8])
def test_batches_are_their_texts_one_by_one(num_rows: int) -> None:
    """Padded to one length, texts have the ids that they have alone."""
    inputs = prompts((0, 5, 2, 9, 1, 7, 3, 10)[:num_rows])
    together = ours(model("llama"), **inputs, **GREEDY)
    for row, mask in enumerate(inputs["attention_mask"]):
        alone = inputs["input_ids"][row, mask.bool()][None]
        got = ours(model("llama"), input_ids=alone, **GREEDY)
        assert together[row, 11:].tolist() == got[0, alone.shape[1] :].tolist()


def test_all_rows_filled_up_have_the_same_bits_whatever_drafts() -> None:
    """In bfloat16, where kernels round by whole steps: plain decoding, short drafts and long ones agree to the bit."""
    half, assistant = make_model("llama").to(torch.bfloat16), copy.deepcopy(draft("llama")).to(torch.bfloat16)
    arguments: dict[str, Any] = {**prompts((0,)), **GREEDY, "max_new_tokens": 48, "eos_token_id": None}
    arguments |= {"return_dict_in_generate": True, "output_logits": True, "fixed_rows": True, "adaptive": False}
    outputs = [
        foredraft.hf.generate(half, **arguments, **options)
        for options in (
            {"num_assistant_tokens": 0},
            {"num_assistant_tokens": 3},
            {"num_assistant_tokens": 3, "assistant_model": assistant},
            {"num_assistant_tokens": 9, "assistant_model": assistant, "prompt_lookup_num_tokens": 4},
        )
    ]
    assert len({tuple(output.sequences[0].tolist()) for output in outputs}) == 1
    for other in outputs[1:]:
        assert all(a.equal(b) for a, b in zip(outputs[0].logits, other.logits, strict=True))


@pytest.mark.parametrize("fixed_rows", [True, False])
def test_no_trees_where_rows_are_to_have_the_bits_of_chains(fixed_rows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention sums in the order of slots, which is not a tree's."""
    forward, trees = HFModel.forward, []

    def watch(run: HFModel, batch: Sequence[Rows], hidden_layers: Sequence[int] = ()) -> Any:
        trees.extend(rows for rows in batch if rows.parents is not None and rows.start > 10)  # no probes
        return forward(run, batch, hidden_layers)

    monkeypatch.setattr(HFModel, "forward", watch)
    monkeypatch.setattr("foredraft.hf.batch.measure_pass_costs", lambda *_: PassCosts([1.0] * len(ROWS)))
    target, arguments = make_model("llama"), {**prompts((0,)), **GREEDY, "max_new_tokens": 48, "eos_token_id": None}
    foredraft.hf.generate(target, **arguments, assistant_model=draft("llama"), fixed_rows=fixed_rows)
    assert bool(trees) != fixed_rows


@pytest.mark.parametrize("do_sample", [False, True])
def test_another_tokenizer_and_a_wider_vocabulary(do_sample: bool) -> None:
    """The assistant knows only half of the letters; the rest of the text is written without its help."""
    assistant = make_model("llama", vocab_size=VOCAB // 2)
    arguments = {**prompts(), **GREEDY, "do_sample": do_sample, "eos_token_id": None}
    got = foredraft.hf.generate(
        model("llama"),
        **arguments,
        assistant_model=assistant,
        tokenizer=letter_tokenizer(),
        assistant_tokenizer=letter_tokenizer(order=2),
        num_assistant_tokens=4,
        adaptive=False,
    )
    assert got.shape == (4, 27)
    assert do_sample or got.equal(model("llama").generate(**arguments))


@pytest.mark.parametrize("do_sample", [False, True])
def test_an_assistant_proposes_from_the_front_of_its_head(do_sample: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And from the text's own tokens; greedy ids stay, and drafts are accepted still."""
    monkeypatch.setattr(generate_module, "AUTO_DRAFT_VOCAB", 60)
    target, assistant = model("llama"), copy.deepcopy(model("llama"))
    arguments: dict[str, Any] = {**prompts(), **GREEDY, "do_sample": do_sample, "eos_token_id": None, "top_k": 4}
    arguments |= {"assistant_model": assistant, "num_assistant_tokens": 3, "adaptive": False}
    widths: list[int] = []
    hook = assistant.get_output_embeddings().register_forward_hook(lambda *_: widths.append(1))
    got: list[Any] = []
    passes = count_passes(target, lambda: got.append(foredraft.hf.generate(target, **arguments)))
    hook.remove()
    assert passes < 16
    assert do_sample or got[0].equal(target.generate(**prompts(), **GREEDY, eos_token_id=None))
    assert len(widths) < 8  # the whole head ran only when the model was held against itself
