"""`foredraft.hf.generate` against `model.generate`: equal ids, whatever drafts and whatever is asked."""

from __future__ import annotations

import copy
from collections import Counter
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
import transformers
from transformers import StoppingCriteriaList, TextIteratorStreamer, TextStreamer
from transformers.generation.streamers import BaseStreamer

import foredraft.hf
from foredraft.errors import ForedraftError, ParameterError, TokenizerMismatchError, UnsupportedModelError
from tests.hf.calls import DRAFTERS, LETTERS, count_passes, drafter, letter_tokenizer, ours
from tests.models.hf.zoo import ARCHITECTURES, EOS, PAD, REFUSED, VOCAB, draft, make_model, model, prompts


@pytest.mark.parametrize("spec", DRAFTERS)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_ids_are_generates(name: str, spec: str) -> None:
    for num_pads in ((0, 3, 7, 1), (2,)):
        arguments = {**prompts(num_pads), "max_new_tokens": 14, "do_sample": False}
        got = foredraft.hf.generate(model(name), **arguments, adaptive=False, **drafter(spec, name))
        assert got.tolist() == plain_ids(name, num_pads)


@lru_cache
def plain_ids(name: str, num_pads: tuple[int, ...]) -> list[list[int]]:
    ids: list[list[int]] = model(name).generate(**prompts(num_pads), max_new_tokens=14, do_sample=False).tolist()
    return ids


def test_drafts_are_accepted() -> None:
    target, options = model("llama"), {**prompts((0,)), "max_new_tokens": 40, "do_sample": False}
    ours(target, "model", **options)  # the first call holds the model's passes against its own
    assert count_passes(target, lambda: ours(target, "model", **options)) < 25
    assert count_passes(target, lambda: ours(target, "none", **options)) == 40


def test_input_ids_may_be_the_first_argument() -> None:
    ids = prompts((0,))["input_ids"]
    options = {"max_new_tokens": 8, "do_sample": False}
    assert foredraft.hf.generate(model("llama"), ids, **options).equal(model("llama").generate(ids, **options))


@pytest.mark.parametrize(
    "options",
    [
        {"max_length": 19},
        {"min_new_tokens": 12, "eos_token_id": list(range(3, 60))},
        {"min_length": 20, "eos_token_id": list(range(3, 60))},
        {"repetition_penalty": 1.7},
        {"no_repeat_ngram_size": 2},
        {"encoder_repetition_penalty": 1.5},
        {"encoder_no_repeat_ngram_size": 1},
        {"forced_eos_token_id": 7},
        {"suppress_tokens": list(range(3, 50))},
        {"begin_suppress_tokens": list(range(3, 80))},
        {"exponential_decay_length_penalty": (3, 1.5)},
        {"remove_invalid_values": True},
        {"prefix_allowed_tokens_fn": lambda row, ids: [3 + row, 20 + row, 40 + len(ids) % 7]},
    ],
    ids=lambda options: next(iter(options)),
)
def test_arguments_of_generate(options: dict[str, Any]) -> None:
    arguments = {**prompts(), "max_new_tokens": 16, "do_sample": False, **options}
    if "max_length" in options:
        del arguments["max_new_tokens"]
    plain = model("llama").generate(**arguments)
    free = model("llama").generate(**prompts(), max_new_tokens=16, do_sample=False)
    assert plain.tolist() != free.tolist() or "remove_invalid_values" in options  # the argument does something
    assert ours(model("llama"), **arguments).tolist() == plain.tolist()


def test_bad_words_and_biases() -> None:
    free = model("llama").generate(**prompts(), max_new_tokens=16, do_sample=False)[:, 11:]
    pair = free[0, 4:6].tolist()
    for options in ({"bad_words_ids": [pair, [int(free[1, 3])]]}, {"sequence_bias": [[pair, -20.0], [[5], 4.0]]}):
        arguments = {**prompts(), "max_new_tokens": 16, "do_sample": False, **options}
        plain = model("llama").generate(**arguments)
        assert plain[:, 11:].tolist() != free.tolist()
        assert ours(model("llama"), **arguments).tolist() == plain.tolist()


@pytest.mark.parametrize("position", range(6))
def test_end_of_text_at_every_position_of_a_block(position: int) -> None:
    """Rows end at different times; what was drafted behind the end is not in the result."""
    free = model("llama").generate(**prompts(), max_new_tokens=16, do_sample=False)
    ends = [int(free[0, 11 + position]), int(free[2, 14])]
    arguments = {**prompts(), "max_new_tokens": 16, "do_sample": False, "eos_token_id": ends}
    plain = model("llama").generate(**arguments)
    assert (plain == PAD).sum() > 11  # of the answers, too
    assert ours(model("llama"), **arguments).tolist() == plain.tolist()


class StopAfter:
    """Ends each row behind any of its tokens; looks at the whole batch, as a user's criterion may."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens

    def __call__(self, ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return torch.tensor([int(row[-1]) in self.tokens for row in ids]) & torch.tensor(ids.shape[0] == 4)


@pytest.mark.parametrize("eos_token_id", [EOS, None])
def test_stopping_criteria_see_the_batch_token_by_token(eos_token_id: int | None) -> None:
    """Without an end-of-text token rows that have stopped go on until all have."""
    free = model("llama").generate(**prompts(), max_new_tokens=16, do_sample=False)
    stops = [int(free[row, 11 + at]) for row, at in ((0, 2), (1, 5), (2, 9), (3, 3))]
    target = make_model("llama")
    target.generation_config.eos_token_id = eos_token_id
    arguments = {**prompts(), "max_new_tokens": 16, "do_sample": False}
    arguments["stopping_criteria"] = StoppingCriteriaList([StopAfter(stops)])
    plain = target.generate(**arguments)
    assert 11 < plain.shape[1] < 27
    assert ours(target, **arguments).tolist() == plain.tolist()


def test_stop_strings() -> None:
    free = model("llama").generate(**prompts(), max_new_tokens=16, do_sample=False)
    arguments = {**prompts(), "max_new_tokens": 16, "do_sample": False, "tokenizer": letter_tokenizer()}
    arguments["stop_strings"] = ["".join(LETTERS[int(t)] for t in free[row, 14:16]) for row in range(4)]
    plain = model("llama").generate(**arguments)
    assert plain.shape[1] < free.shape[1]
    assert ours(model("llama"), **arguments).tolist() == plain.tolist()
    config = transformers.GenerationConfig(max_new_tokens=16, do_sample=False, stop_strings=arguments["stop_strings"])
    in_config = {**prompts(), "generation_config": config, "tokenizer": letter_tokenizer()}
    assert ours(model("llama"), **in_config).tolist() == plain.tolist()
    assert config.stop_strings is not None
    with pytest.raises(ParameterError, match="tokenizer must be given with stop_strings"):
        ours(model("llama"), **prompts(), stop_strings="Q")


class Collector(BaseStreamer):
    def __init__(self) -> None:
        self.values: list[list[Any]] = []

    def put(self, value: torch.Tensor) -> None:
        self.values.append(value.tolist())

    def end(self) -> None:
        self.values.append(["end"])


def test_streamers_get_what_generate_gives_them(capsys: pytest.CaptureFixture[str]) -> None:
    batch, one = {**prompts(), "max_new_tokens": 12, "do_sample": False}, prompts((2,))
    collectors = [Collector(), Collector()]
    model("llama").generate(**batch, streamer=collectors[0])
    ours(model("llama"), **batch, streamer=collectors[1])
    assert collectors[0].values == collectors[1].values

    single = {**one, "max_new_tokens": 12, "do_sample": False}
    model("llama").generate(**single, streamer=TextStreamer(letter_tokenizer()))
    plain = capsys.readouterr().out
    ours(model("llama"), **single, streamer=TextStreamer(letter_tokenizer()))
    assert capsys.readouterr().out == plain != ""

    iterator = TextIteratorStreamer(letter_tokenizer())
    ours(model("llama"), **single, streamer=iterator)
    assert "".join(iterator) + "\n" == plain


def test_a_dictionary_with_scores_and_logits() -> None:
    free = model("llama").generate(**prompts(), max_new_tokens=16, do_sample=False)
    arguments = {**prompts(), "max_new_tokens": 16, "do_sample": False, "eos_token_id": int(free[0, 13])}
    arguments |= {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    arguments["repetition_penalty"] = 1.2
    plain, got = model("llama").generate(**arguments), ours(model("llama"), **arguments)
    assert got.sequences.tolist() == plain.sequences.tolist()
    for ours_of_token, theirs, tokens in (
        (got.scores, plain.scores, got.sequences),
        (got.logits, plain.logits, got.sequences),
    ):
        assert len(ours_of_token) == len(theirs)
        for step in range(len(theirs)):
            is_text = tokens[:, 11 + step] != PAD
            torch.testing.assert_close(ours_of_token[step][is_text], theirs[step][is_text], atol=1e-4, rtol=1e-4)
    assert got.logits[0].tolist() != got.scores[0].tolist()


def test_sampling_follows_the_processed_law() -> None:
    """Two tokens of 400 texts against the law that the processors leave, whatever the draft; and by the seed alone."""
    target = make_model("llama", vocab_size=8)
    assistant = make_model("llama", seed=3, vocab_size=8)
    ids = torch.tensor([[3, 4, 5]])
    options = {"do_sample": True, "temperature": 0.9, "top_k": 5, "repetition_penalty": 1.3, "eos_token_id": None}

    def sample() -> torch.Tensor:
        return foredraft.hf.generate(
            target,
            ids,
            **options,
            max_new_tokens=3,
            num_return_sequences=200,
            assistant_model=assistant,
            num_assistant_tokens=2,
            adaptive=False,
        )

    torch.manual_seed(11)
    rounds = [sample(), sample()]
    texts = Counter(tuple(row) for got in rounds for row in got[:, 3:].tolist())
    expected: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        expected = {
            (*text, token): mass * p
            for text, mass in expected.items()
            for token, p in enumerate(law_after(target, [3, 4, 5, *text], options))
            if p > 0
        }
    assert set(texts) <= set(expected)
    likely = [text for text, mass in expected.items() if mass * 400 >= 5]
    seen = [texts[text] for text in likely] + [400 - sum(texts[text] for text in likely)]
    wanted = [expected[text] * 400 for text in likely] + [400 * (1 - sum(expected[text] for text in likely))]
    assert scipy.stats.chisquare(seen, wanted).pvalue > 1e-3
    assert not rounds[0].equal(rounds[1])
    torch.manual_seed(11)
    assert sample().equal(rounds[0])


def law_after(target: Any, tokens: list[int], options: dict[str, Any]) -> np.ndarray:
    """What `generate` samples the next token from."""
    output = target.generate(
        torch.tensor([tokens]),
        attention_mask=torch.ones(1, len(tokens)),  # token 0 is no padding here
        **options,
        max_new_tokens=1,
        return_dict_in_generate=True,
        output_scores=True,
    )
    return np.asarray(output.scores[0][0].double().softmax(dim=0))


def test_padded_heads_are_one_vocabulary() -> None:
    """A draft whose head has rows more, or less, speaks the same tokens."""
    arguments = {**prompts(), "max_new_tokens": 16, "do_sample": False}
    plain = model("llama").generate(**arguments)
    for width in (VOCAB + 128, VOCAB + 32, VOCAB - 32):
        assistant = make_model("llama", vocab_size=width)
        got = foredraft.hf.generate(model("llama"), **arguments, assistant_model=assistant, adaptive=False)
        assert got.tolist() == plain.tolist()


@pytest.mark.parametrize("do_sample", [False, True])
def test_padding_of_a_head_costs_no_acceptance(do_sample: bool) -> None:
    """128 rows more, which no text has: as many passes, and the same draws, as without them."""
    target, assistant = model("llama"), draft("llama")
    options = {**prompts((0,)), "max_new_tokens": 24, "do_sample": do_sample, "eos_token_id": None}

    def run(target: Any, assistant: Any) -> tuple[Any, int]:
        got: list[Any] = []

        def call() -> None:
            torch.manual_seed(1)
            arguments = {"assistant_model": assistant, "num_assistant_tokens": 4, "adaptive": False}
            got.append(foredraft.hf.generate(target, **options, **arguments))

        call()  # the first call holds the model's passes against its own
        return got[0], count_passes(target, call)

    wanted, num_passes = run(target, assistant)
    assert num_passes < 24
    pairs = [(target, padded(assistant))]
    if not do_sample:  # a padded target gives its padding some probability
        pairs += [(padded(target), assistant)]
    for pair in pairs:
        got = run(*pair)
        assert (got[0].tolist(), got[1]) == (wanted.tolist(), num_passes)


def padded(made: Any) -> Any:
    """128 more rows of zeros in embeddings and head."""
    wider = make_model("llama", vocab_size=VOCAB + 128)
    weights = made.state_dict()
    with torch.no_grad():
        for name, weight in wider.state_dict().items():
            weight.zero_()
            weight[: len(weights[name])] = weights[name]
    return wider


def test_an_assistant_of_another_type_of_numbers_and_attention() -> None:
    assistant = make_model("gpt2", attn_implementation="eager").to(torch.bfloat16)
    arguments = {**prompts(), "max_new_tokens": 12, "do_sample": False}
    got = foredraft.hf.generate(model("llama"), **arguments, assistant_model=assistant, adaptive=False)
    assert got.tolist() == model("llama").generate(**arguments).tolist()


@pytest.mark.parametrize("do_sample", [False, True])
def test_an_assistant_of_another_tokenizer(do_sample: bool) -> None:
    """Its letters have other ids. Greedy ids stay; sampled, its law on the shared letters is accepted at times."""
    theirs = letter_tokenizer(order=-1)
    assistant = copy.deepcopy(draft("llama"))
    with torch.no_grad():
        for matrix in (assistant.get_input_embeddings().weight, assistant.get_output_embeddings().weight):
            matrix.copy_(matrix.flip(0).clone())  # the same model, in those ids
    arguments = {**prompts(), "max_new_tokens": 24, "do_sample": do_sample, "eos_token_id": None}
    arguments |= {"tokenizer": letter_tokenizer(), "assistant_tokenizer": theirs, "assistant_model": assistant}
    target = model("llama")

    def run() -> Any:
        return foredraft.hf.generate(target, **arguments, num_assistant_tokens=4, adaptive=False)

    run()
    if not do_sample:
        assert run().tolist() == target.generate(**prompts(), max_new_tokens=24, do_sample=False).tolist()
    assert count_passes(target, run) < 24


def test_another_chat_template_is_no_other_tokenizer() -> None:
    """As of a base and its instruct version: the assistant's tokens are the model's, and all are right."""
    target, theirs = model("llama"), letter_tokenizer()
    theirs.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    options = {**prompts((0,)), "max_new_tokens": 21, "do_sample": False, "eos_token_id": None}
    options |= {"tokenizer": letter_tokenizer(), "assistant_tokenizer": theirs}
    options |= {"assistant_model": copy.deepcopy(target), "num_assistant_tokens": 4, "adaptive": False}
    foredraft.hf.generate(target, **options)  # the first call holds the model's passes against its own
    assert count_passes(target, lambda: foredraft.hf.generate(target, **options)) == 5  # 1 token, then four times 5


def test_an_assistant_whose_context_ends_first() -> None:
    assistant = make_model("gpt2", n_positions=20)
    arguments = {**prompts(), "max_new_tokens": 16, "do_sample": False}
    got = foredraft.hf.generate(model("llama"), **arguments, assistant_model=assistant, adaptive=False)
    assert got.tolist() == model("llama").generate(**arguments).tolist()


def test_without_a_pad_token() -> None:
    """`generate` pads with the end-of-text token then."""
    target = make_model("llama")
    target.config.pad_token_id = target.generation_config.pad_token_id = None
    free = target.generate(**prompts(), max_new_tokens=16, do_sample=False)
    arguments = {**prompts(), "max_new_tokens": 16, "do_sample": False, "eos_token_id": int(free[1, 14])}
    assert ours(target, **arguments).tolist() == target.generate(**arguments).tolist()


def test_padding_is_found_without_a_mask() -> None:
    ids = prompts()["input_ids"]
    arguments = {"max_new_tokens": 12, "do_sample": False}
    assert ours(model("llama"), inputs=ids, **arguments).equal(model("llama").generate(ids, **arguments))


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_cannot_undo_are_refused(name: str) -> None:
    with pytest.raises(
        UnsupportedModelError, match=r"cannot be speculated with: it (has recurrent|takes no positions)"
    ):
        ours(make_model(name, **REFUSED[name]), **prompts(), max_new_tokens=4)


BATCH = prompts()


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (ParameterError, "pad on the left", {"attention_mask": BATCH["attention_mask"].flip(1)}),
        (ParameterError, "hides a whole row", {"attention_mask": torch.zeros(4, 11, dtype=torch.long)}),
        (ParameterError, "has no rows", {k: v[:0] for k, v in BATCH.items()}),
        (UnsupportedModelError, "beam search", {"num_beams": 2}),
        (UnsupportedModelError, "custom_generate decodes by itself", {"custom_generate": print}),
        (UnsupportedModelError, "penalty_alpha asks for another way", {"penalty_alpha": 0.6, "top_k": 4}),
        (UnsupportedModelError, "dola_layers asks for another way", {"dola_layers": "low"}),
        (ParameterError, "pad_token_id must be the id of a token", {"pad_token_id": -1}),
        (ParameterError, "cache_implementation must be one of", {"cache_implementation": "nonsense"}),
        (UnsupportedModelError, "position_ids", {"position_ids": torch.arange(5, 16).expand(4, 11)}),
        (UnsupportedModelError, "keeps state", {"guidance_scale": 1.5}),
        (ParameterError, "reaches 256", {"max_new_tokens": 250}),
        (
            UnsupportedModelError,
            "output_hidden_states out",
            {"return_dict_in_generate": True, "output_hidden_states": True},
        ),
        (ParameterError, "tokenizer must be given", {"assistant_tokenizer": letter_tokenizer()}),
        (
            TokenizerMismatchError,
            "assistant_model cannot draft for the model",
            {"tokenizer": letter_tokenizer(), "assistant_tokenizer": letter_tokenizer(1)},
        ),
        (ParameterError, "between 0 and 64", {"num_assistant_tokens": 65}),
    ],
)
def test_what_cannot_be_followed_is_refused(
    error: type[ForedraftError], message: str, arguments: dict[str, Any]
) -> None:
    with pytest.raises(error, match=message):
        foredraft.hf.generate(model("llama"), **(BATCH | {"max_new_tokens": 4} | arguments))


def test_a_training_model_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"call model\.eval\(\) first"):
        ours(make_model("llama").train(), **prompts(), max_new_tokens=4)


def test_a_filled_cache_is_refused() -> None:
    target = model("llama")
    cache = target(prompts((0,))["input_ids"][:, :-1]).cache
    with pytest.raises(UnsupportedModelError, match="holds a text already"):
        ours(target, **prompts((0,)), cache=cache, max_new_tokens=4)
