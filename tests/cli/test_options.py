"""Flags → dataclasses."""

from __future__ import annotations

import inspect
import json
from dataclasses import asdict, fields
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from foredraft.cli.options import EngineOptions, engine_options, sampling_options
from foredraft.cli.serve import command as serve
from foredraft.cli.speculative_config import SpeculativeConfig, parse_speculative_config
from foredraft.engine.llm import LLM
from foredraft.errors import ParameterError
from foredraft.types import SamplingParams, StructuredOutputs


@click.command()
@engine_options
@sampling_options
def show(options: EngineOptions, params: SamplingParams) -> None:
    click.echo(json.dumps([asdict(options), asdict(params)]))


def parse(*args: str) -> tuple[EngineOptions, SamplingParams]:
    result = CliRunner().invoke(show, ["-m", "m", *args], standalone_mode=False)
    if result.exception:
        raise result.exception
    options, params = json.loads(result.stdout)
    params["logit_bias"] = {int(token): bias for token, bias in params["logit_bias"].items()}
    params["stop"] = tuple(params["stop"])
    params["stop_token_ids"] = tuple(params["stop_token_ids"])
    if params["structured_outputs"] is not None:
        params["structured_outputs"] = StructuredOutputs(**params["structured_outputs"])
    return EngineOptions(**options), SamplingParams(**params)


def test_the_defaults_are_the_dataclasses_own_but_greedy() -> None:
    assert parse() == (EngineOptions("m"), SamplingParams(temperature=0))


def test_every_flag_reaches_its_field() -> None:
    line = (
        "-d ngram+model:q -k 5 --rejection-sample-method block --draft-quantize q4 --draft-vocab 32k --no-adaptive "
        "--cross-vocab tli --quantize q8 --backend native "
        "-t 3 -c 4096 --kv-cache-dtype f32 -n 9 --temp 0.5 --top-p 0.9 --top-k 40 --min-p 0.05 --seed 7 "
        "--stop a --stop b --presence-penalty 1 --frequency-penalty 0.5 --repetition-penalty 1.1 "
        "--logit-bias 5=-100 --logit-bias 7=2.5 --min-tokens 3 --ignore-eos"
    )
    options, params = parse(*line.split())
    assert options == EngineOptions(
        model="m",
        drafter="ngram+model:q",
        num_speculative_tokens=5,
        rejection_sample_method="block",
        draft_quantize="q4",
        draft_vocab=32 * 1024,
        cross_vocab="tli",
        adaptive=False,
        threads=3,
        max_model_len=4096,
        kv_cache_dtype="f32",
        quantize="q8",
        backend="native",
    )
    assert params == SamplingParams(
        max_tokens=9,
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        seed=7,
        stop=("a", "b"),
        presence_penalty=1,
        frequency_penalty=0.5,
        repetition_penalty=1.1,
        logit_bias={5: -100, 7: 2.5},
        min_tokens=3,
        ignore_eos=True,
    )


def test_what_the_answer_is_comes_as_text_or_from_a_file(tmp_path: Path) -> None:
    schema, grammar = tmp_path / "schema.json", tmp_path / "list.lark"
    schema.write_text('{"type": "object"}')
    grammar.write_text('start: "a" | "b"')
    for args, wanted in (
        (["--json-schema", ' {"type": "array"}'], StructuredOutputs(json_schema=' {"type": "array"}')),
        (["--json-schema", str(schema)], StructuredOutputs(json_schema='{"type": "object"}')),
        (["--regex", "[a-z]+"], StructuredOutputs(regex="[a-z]+")),
        (["--grammar", str(grammar)], StructuredOutputs(grammar='start: "a" | "b"')),
    ):
        assert parse(*args)[1].structured_outputs == wanted
    with pytest.raises(click.UsageError, match="give one of them"):
        parse("--regex", "a", "--json-schema", "{}")
    with pytest.raises((click.UsageError, OSError, ParameterError)):
        parse("--json-schema", str(tmp_path / "missing.json"))


def test_the_defaults_are_those_of_the_library() -> None:
    arguments = inspect.signature(LLM).parameters
    defaults = {field.name: field.default for field in fields(EngineOptions) if field.name != "model"}
    assert defaults == {name: arguments[name].default for name in defaults}


def test_no_field_of_the_engine_is_out_of_reach() -> None:
    flags = {parameter.name for parameter in show.params}
    every = {field.name for field in fields(EngineOptions)}
    unreachable = every - flags
    by_config = {
        "prompt_lookup_min",
        "prompt_lookup_max",
        "draft_tensor_parallel_size",
    }  # --speculative-config has them
    assert every - {parameter.name for parameter in serve.params} == by_config
    assert unreachable == by_config | {
        "max_num_seqs",
        "max_num_batched_tokens",
        "kv_cache_tokens",
        "enable_prefix_caching",
    }  # one prompt at a time


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ("--temperature -1", "--temperature/--temp must be 0 (greedy) or more"),
        ("--temperature nan", "--temperature/--temp needs a finite number"),
        ("--top-p 0", "--top-p must be above 0"),
        ("--top-p 1.5", "--top-p must be above 0 and at most 1"),
        ("--top-k -2", "--top-k must be positive"),
        ("--min-p 2", "--min-p must lie between"),
        ("-n 0", "-n/--max-tokens must be at least 1"),
        ("--min-tokens 300", "--min-tokens must not exceed -n/--max-tokens"),
        ("--repetition-penalty 0", "--repetition-penalty must lie between 0.01"),
        ("--presence-penalty 3", "--presence-penalty must lie between"),
        ("--logit-bias 5", "'5' is not of the form TOKEN_ID=BIAS"),
        ("--logit-bias 5=x", "'5=x' is not of the form TOKEN_ID=BIAS"),
        ("--logit-bias 5=101", "--logit-bias must lie between"),
        ("-k -1", "-1 is not in the range"),
        ("-k 1000000", "1000000 is not in the range"),
        ("-t 0", "0 is not in the range"),
        ("-t 257", "257 is not in the range"),
        ("-c 0", "0 is not in the range"),
        ("--draft-vocab zero", "'zero' is no number of tokens"),
        ("--draft-vocab 0", "'0' is no number of tokens"),
        ("--draft-quantize q3", "'q3' is not one of"),
        ("--kv-cache-dtype bf16", "'bf16' is not one of"),
        ("--rejection-sample-method tree", "'tree' is not one of"),
        ("--seed x", "'x' is not a valid integer"),
    ],
)
def test_an_impossible_value_is_bad_usage(args: str, words: str) -> None:
    with pytest.raises(click.UsageError) as caught:
        parse(*args.split())
    assert words in caught.value.format_message()


@pytest.mark.parametrize(
    ("args", "field", "line"),
    [
        ("-c 9", "max_model_len", "-c/--max-model-len is wrong"),
        ("-d x", "drafter", "-d/--drafter is wrong"),
        ("--regex (", "structured_outputs", "--regex is wrong"),
        ("--regex=", "structured_outputs", "--regex is wrong"),
        ("--json-schema {}", "structured_outputs", "--json-schema is wrong"),
        ("", "--peers", "--peers is wrong"),
    ],
)
def test_what_is_wrong_only_when_the_command_runs_is_told_by_its_flag(args: str, field: str, line: str) -> None:
    @click.command()
    @engine_options
    @sampling_options
    def fail(options: EngineOptions, params: SamplingParams) -> None:
        raise ParameterError(field, "is wrong")

    result = CliRunner().invoke(fail, ["-m", "m", *args.split()], standalone_mode=False)
    assert str(result.exception) == line


def test_vllms_words_for_the_same_choices() -> None:
    ngram = '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 2}'
    assert parse("--speculative-config", ngram)[0] == EngineOptions(
        "m", num_speculative_tokens=5, prompt_lookup_max=4, prompt_lookup_min=2
    )
    model = '{"model": "org/draft:q4.gguf", "rejection_sample_method": "block", "quantization": "q4"}'
    assert parse("--speculative-config", model)[0] == EngineOptions(
        "m", "model:org/draft:q4.gguf", rejection_sample_method="block", draft_quantize="q4"
    )
    for word, meaning in (("true", "tli"), ("false", "off")):
        text = f'{{"model": "org/draft", "use_heterogeneous_vocab": {word}}}'
        assert parse("--speculative-config", text)[0] == EngineOptions("m", "model:org/draft", cross_vocab=meaning)
    assert parse_speculative_config("{}") == SpeculativeConfig("ngram")
    assert parse_speculative_config('{"model": null}') == SpeculativeConfig("ngram")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{method: ngram}", "is not JSON: "),
        ("", "is not JSON: "),
        ("[]", "must be a JSON object"),
        ('{"num_speculative_token": 3}', "unknown key 'num_speculative_token'; did you mean 'num_speculative_tokens'?"),
        ('{"xyzzy": 3}', "unknown key 'xyzzy'; known keys: method, model"),
        ('{"method": "eagle3"}', "'eagle3' for 'method'; choose one of: ngram, draft_model"),
        ('{"method": "draft_model"}', "needs 'model'"),
        ('{"method": "ngram", "model": "x"}', "takes no 'model'"),
        ('{"model": "x", "prompt_lookup_max": 3}', "'prompt_lookup_max' with method 'ngram' only"),
        ('{"prompt_lookup_max": 2, "prompt_lookup_min": 3}', "'prompt_lookup_min' above"),
        ('{"num_speculative_tokens": -1}', "from 0 to 64 for 'num_speculative_tokens'"),
        ('{"num_speculative_tokens": true}', "from 0 to 64 for 'num_speculative_tokens'"),
        ('{"num_speculative_tokens": "5"}', "from 0 to 64 for 'num_speculative_tokens'"),
        ('{"model": 3}', "a string for 'model'"),
        ('{"quantization": "fp8"}', "'fp8' for 'quantization'"),
        ('{"use_heterogeneous_vocab": "yes"}', "true or false for 'use_heterogeneous_vocab'"),
        ('{"rejection_sample_method": ["block"]}', "for 'rejection_sample_method'"),
    ],
)
def test_a_wrong_speculative_config_is_named(text: str, words: str) -> None:
    with pytest.raises(ParameterError) as caught:
        parse("--speculative-config", text)
    assert str(caught.value).startswith("--speculative-config ")
    assert words in str(caught.value)


@pytest.mark.parametrize("flags", ["-d none", "-k 3"])
def test_a_flag_and_the_config_may_not_both_choose(flags: str) -> None:
    with pytest.raises(click.UsageError, match="both choose"):
        parse(*flags.split(), "--speculative-config", '{"method": "ngram", "num_speculative_tokens": 5}')


@pytest.mark.parametrize("text", ["[" * 100_000, '{"num_speculative_tokens": ' + "9" * 5000 + "}"])
def test_json_that_python_cannot_hold_is_bad_usage(text: str) -> None:
    with pytest.raises(ParameterError, match="nested too deeply, or"):
        parse_speculative_config(text)
