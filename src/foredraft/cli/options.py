"""Flags that several commands share, each declared once. Defaults are those of the dataclasses."""

from __future__ import annotations

import functools
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, Field, dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import click

from foredraft.cli.console import STANDARD_STREAM, STDOUT_NAMES, Session, check_target, is_file_of, note, read_text
from foredraft.cli.speculative_config import (
    CROSS_VOCABS,
    QUANTIZATIONS,
    REJECTION_SAMPLE_METHODS,
    parse_speculative_config,
)
from foredraft.errors import ChatTemplateError, EngineUnavailableError, ParameterError
from foredraft.types import MAX_DRAFT, MAX_THREADS, SamplingParams, StructuredOutputs

if TYPE_CHECKING:
    from foredraft.engine.llm import LLM
    from foredraft.engine.loader import LoadProgress

Command = TypeVar("Command", bound=Callable[..., object])

#: Flags that say each what the answer is: fields of StructuredOutputs.
FORMATS = ("json_schema", "regex", "grammar")


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What `-m`, `-d` and the flags beside them say, in the words of `LLM`."""

    model: str
    drafter: str = "ngram"
    num_speculative_tokens: int | None = None
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None
    rejection_sample_method: Literal["standard", "block"] = "standard"
    draft_quantize: Literal["auto", "q4", "q8", "none"] = "auto"
    draft_vocab: int | Literal["auto", "full"] = "auto"
    cross_vocab: Literal["auto", "text", "tli", "off"] = "auto"
    adaptive: bool = True
    threads: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 512
    kv_cache_tokens: int | None = None
    enable_prefix_caching: bool = True
    kv_cache_dtype: Literal["f16", "f32"] = "f16"
    quantize: Literal["auto", "q4", "q8", "none"] = "auto"
    backend: Literal["auto", "native", "hf"] = "auto"
    device: str | None = None
    device_map: str | None = None
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    trust_remote_code: bool = False
    fixed_rows: bool = False
    enforce_eager: bool = False
    tensor_parallel_size: int = 1
    draft_tensor_parallel_size: int = 1


def make_llm(options: EngineOptions, progress: LoadProgress) -> LLM:
    from foredraft.engine.llm import LLM

    return LLM(**{field.name: getattr(options, field.name) for field in fields(options)}, progress=progress)


def open_llm(
    options: EngineOptions, session: Session, should_stop: Callable[[], bool] = lambda: False, *, chats: bool = False
) -> LLM:
    """Loads what the flags name, with progress on stderr.

    chats: raises ChatTemplateError at once for a model without a template. Raises EngineUnavailableError once it should
    stop.
    """
    from foredraft.cli.progress import Progress

    with Progress() as progress:

        def report(what: str, done: int, total: int) -> None:
            if should_stop():
                raise EngineUnavailableError("loading was stopped")
            progress(what, done, total)

        if chats:
            _require_chat_template(options, report)
        llm = make_llm(options, report)
    if session.debug:
        for plan in llm.memory_plans:
            note(str(plan))
    return llm


def _require_chat_template(options: EngineOptions, progress: LoadProgress) -> None:
    from foredraft.engine.loader import LoadOptions, ModelLoader

    shared = {field.name for field in fields(LoadOptions)} & {field.name for field in fields(options)} - {"fixed_rows"}
    loader = ModelLoader(LoadOptions(**{name: getattr(options, name) for name in shared}), progress)
    if not loader.has_chat_template(options.model):
        raise ChatTemplateError(f"{options.model} has no chat template; use foredraft generate --raw")


def parse_target(ctx: click.Context, param: click.Parameter, value: str | None) -> str | None:
    """Whatever names stdout is STANDARD_STREAM: only the object goes there. Raises where it cannot be written."""
    if value is not None and (os.path.abspath(value) in STDOUT_NAMES or is_file_of(sys.stdout, value)):
        return STANDARD_STREAM
    if value is not None and value != STANDARD_STREAM:
        check_target(value)
    return value


#: `--json [FILE]`: the command gets `json_target`, STANDARD_STREAM for no file, None without the flag.
json_option = click.option(
    "--json",
    "json_target",
    metavar="[FILE]",
    is_flag=False,
    flag_value=STANDARD_STREAM,
    callback=parse_target,
    help="Write a JSON object to stdout, or to FILE.",
)


def debug_option(command: Command) -> Command:
    """`--debug`: tracebacks, the plan of the memory, and what the engine decides."""

    def switch_on(ctx: click.Context, _: click.Parameter, value: bool) -> None:
        if value:
            ctx.ensure_object(Session).debug = True
            logging.getLogger("foredraft").setLevel(logging.INFO)

    return click.option(
        "--debug",
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=switch_on,
        help="Show tracebacks, the plan of the memory and what the engine decides.",
    )(command)


def engine_options(command: Command) -> Command:
    """Adds the flags of EngineOptions; the command gets them, checked, as `options`."""
    model = click.option(
        "-m",
        "--model",
        required=True,
        help="A .gguf file, a catalogue name, a hub id org/repo[:file.gguf], or a folder of Transformers.",
    )
    return collect(command, [model, *_engine_flags()], "options", _make_engine_options)


def served_engine_options(command: Command) -> Command:
    """The same for a server: the model is an argument, and vLLM's words for batches are flags too."""
    flags = [
        click.argument("model", metavar="MODEL"),
        *_engine_flags(),
        click.option("--draft-model", metavar="MODEL", help="The same as -d model:MODEL."),
        click.option(
            "--max-num-seqs", type=click.IntRange(1), help=f"Answers computed at once.{shown('max_num_seqs')}"
        ),
        click.option(
            "--max-num-batched-tokens",
            type=click.IntRange(1),
            help=f"Tokens of prompts and answers in one pass.{shown('max_num_batched_tokens')}",
        ),
        click.option(
            "--kv-cache-tokens",
            type=click.IntRange(1),
            help="Tokens that a model's cache holds, all answers together. [default: room for all, up to 65536]",
        ),
        click.option(
            "--enable-prefix-caching/--no-enable-prefix-caching",
            default=None,
            help="Keep what prompts begin with for others that begin alike. [default: keep]",
        ),
    ]
    return collect(command, flags, "options", _make_engine_options)


def _engine_flags() -> list[Callable[[Command], Command]]:
    return [
        click.option(
            "-d", "--drafter", help=f"none, ngram, model:NAME, or several: ngram+model:NAME.{shown('drafter')}"
        ),
        click.option("-k", "--num-speculative-tokens", type=click.IntRange(0, MAX_DRAFT), help="Largest draft."),
        click.option("--speculative-config", metavar="JSON", help="The same choices in vLLM's words."),
        click.option(
            "--rejection-sample-method",
            type=click.Choice(REJECTION_SAMPLE_METHODS),
            help=f"Rule for drafts that are sampled.{shown('rejection_sample_method')}",
        ),
        click.option(
            "--draft-quantize",
            type=click.Choice(QUANTIZATIONS),
            help=f"Weights of a draft model.{shown('draft_quantize')}",
        ),
        click.option(
            "--draft-vocab",
            metavar="N|32k|full",
            callback=_parse_draft_vocab,
            help=f"Tokens that a draft model proposes from.{shown('draft_vocab')}",
        ),
        click.option(
            "--cross-vocab",
            type=click.Choice(CROSS_VOCABS),
            help=f"How a draft model of another tokenizer drafts, if at all.{shown('cross_vocab')}",
        ),
        click.option(
            "--adaptive/--no-adaptive",
            default=None,
            help="Let measured costs choose how much is drafted, or always draft the most. [default: adaptive]",
        ),
        click.option(
            "-t", "--threads", type=click.IntRange(1, MAX_THREADS), help="Threads. [default: processors we may use]"
        ),
        click.option("-c", "--max-model-len", type=click.IntRange(1), help="Context in tokens. [default: the model's]"),
        click.option(
            "--kv-cache-dtype",
            type=click.Choice(("f16", "f32")),
            help=f"Precision of keys and values on the CPU core.{shown('kv_cache_dtype')}",
        ),
        click.option(
            "--quantize",
            type=click.Choice(QUANTIZATIONS),
            help="Weights of the model on the CPU core; auto keeps a .gguf file's own, and makes those of a folder q8."
            f"{shown('quantize')}",
        ),
        *_transformers_flags(),
    ]


def _transformers_flags() -> list[Callable[[Command], Command]]:
    return [
        click.option(
            "--backend",
            type=click.Choice(("auto", "native", "hf")),
            help="What runs the model: the CPU core or Transformers; auto takes the core where it "
            f"knows the family and no flag is for Transformers alone.{shown('backend')}",
        ),
        click.option("--device", help="Of a Transformers model, such as cuda:1. [default: the first GPU, else cpu]"),
        click.option("--device-map", metavar="auto", help="Spread a Transformers model over several devices."),
        click.option(
            "--dtype",
            type=click.Choice(("auto", "float32", "float16", "bfloat16")),
            help=f"Of a Transformers model's weights; auto takes the files'.{shown('dtype')}",
        ),
        click.option(
            "--trust-remote-code", is_flag=True, default=None, help="Run code that a Transformers repository brings."
        ),
        click.option(
            "--fixed-rows",
            is_flag=True,
            default=None,
            help="Fill passes of a Transformers model up, so that texts have the same bits with any draft.",
        ),
        click.option(
            "--enforce-eager",
            is_flag=True,
            default=None,
            help="Run Transformers models on a GPU without CUDA graphs.",
        ),
        click.option(
            "-tp",
            "--tensor-parallel-size",
            type=click.IntRange(1),
            help="Processes that share a Transformers model, one a GPU, or on the CPU; they are started here."
            f"{shown('tensor_parallel_size')}",
        ),
    ]


def sampling_options(command: Command) -> Command:
    """Adds the flags of SamplingParams; the command gets them, checked, as `params`."""
    flags = [
        click.option("-n", "--max-tokens", type=int, help=f"Longest answer.{shown('max_tokens', SamplingParams)}"),
        click.option("--temperature", "--temp", "temperature", type=float, help="0 is greedy. [default: 0]"),
        click.option("--top-p", type=float, help="Keep the likeliest tokens of this total probability."),
        click.option("--top-k", type=int, help="Keep so many of the likeliest tokens."),
        click.option(
            "--min-p", type=float, help="Keep tokens of at least this share of the likeliest one's probability."
        ),
        click.option("--seed", type=int, help="Same seed, same text, with and without speculation."),
        click.option("--stop", multiple=True, metavar="TEXT", help="End before this text. May be repeated."),
        click.option("--presence-penalty", type=float, help="Subtracted from the logits of tokens already said."),
        click.option("--frequency-penalty", type=float, help="The same, for each time that they were said."),
        click.option("--repetition-penalty", type=float, help="Divides the logits of tokens said or in the prompt."),
        click.option(
            "--logit-bias",
            multiple=True,
            metavar="ID=BIAS",
            callback=_parse_logit_bias,
            help="Added to the logit of a token id. May be repeated.",
        ),
        click.option("--min-tokens", type=int, help="No end before so many tokens."),
        click.option("--ignore-eos", is_flag=True, default=None, help="Go on after an end-of-text token."),
        click.option("--json-schema", metavar="JSON|FILE", help="The answer is JSON of this schema."),
        click.option("--regex", metavar="REGEX", help="The answer matches this regular expression."),
        click.option("--grammar", metavar="FILE", help="The answer is a text of this grammar, Lark or GBNF."),
    ]
    return collect(command, flags, "params", _make_sampling_params)


def collect(
    command: Command,
    flags: Sequence[Callable[[Command], Command]],
    argument: str,
    make: Callable[[Mapping[str, Any]], object],
) -> Command:
    """Decorates `command` with flags, whose given values reach it made into one argument."""
    names: list[str] = []

    @functools.wraps(command)
    def collected(**values: Any) -> object:
        given = {name: value for name in names if (value := values.pop(name)) is not None}
        with _naming_flags(click.get_current_context()):
            return command(**values, **{argument: make(given)})

    decorated: Any = collected
    num_others = len(getattr(command, "__click_params__", ()))
    for flag in reversed(flags):
        decorated = flag(decorated)
    names += [param.name for param in decorated.__click_params__[num_others:]]
    result: Command = decorated
    return result


@contextmanager
def _naming_flags(ctx: click.Context) -> Iterator[None]:
    """Errors name the flags of the command where the library names fields: `-c/--max-model-len`, not max_model_len."""
    try:
        yield
    except ParameterError as error:
        options = [param for param in ctx.command.params if isinstance(param, click.Option)]
        flags = {str(option.name): "/".join(option.opts) for option in options}
        flags["structured_outputs"] = "".join(flags[name] for name in FORMATS if ctx.params.get(name) is not None)
        if error.field not in flags:
            raise
        problem = str(error).removeprefix(error.field)
        problem = re.sub("[a-z]+(_[a-z]+)+", lambda field: flags.get(field[0], field[0]), problem)
        raise click.UsageError(flags[error.field] + problem, ctx) from error


def _make_engine_options(given: Mapping[str, Any]) -> EngineOptions:
    values = dict(given)
    draft_model = values.pop("draft_model", None)
    if draft_model is not None:
        if "drafter" in values:
            raise click.UsageError("--drafter and --draft-model both choose; give one of them")
        values["drafter"] = f"model:{draft_model}"
    text = values.pop("speculative_config", None)
    if text is None:
        return EngineOptions(**values)
    config = parse_speculative_config(text)
    said = {
        "drafter": config.drafter,
        "num_speculative_tokens": config.num_speculative_tokens,
        "prompt_lookup_min": config.prompt_lookup_min,
        "prompt_lookup_max": config.prompt_lookup_max,
        "rejection_sample_method": config.rejection_sample_method,
        "draft_quantize": config.quantization,
        "cross_vocab": config.cross_vocab,
        "draft_tensor_parallel_size": config.draft_tensor_parallel_size,
    }
    for name, value in said.items():
        if value is None:
            continue
        if name in values:
            raise click.UsageError(f"--{name.replace('_', '-')} and --speculative-config both choose; give one of them")
        values[name] = value
    return EngineOptions(**values)


def _make_sampling_params(given: Mapping[str, Any]) -> SamplingParams:
    """The command line is greedy unless told otherwise."""
    values = dict(given)
    wanted = {name: values.pop(name) for name in FORMATS if name in values}
    if len(wanted) > 1:
        raise click.UsageError("--json-schema, --regex and --grammar say each what the answer is; give one of them")
    schema = wanted.get("json_schema")
    if schema is not None and not schema.lstrip().startswith("{"):
        wanted["json_schema"] = read_text(schema)
    if "grammar" in wanted:
        wanted["grammar"] = read_text(wanted["grammar"])
    structured_outputs = StructuredOutputs(**wanted) if wanted else None
    return SamplingParams(**{"temperature": 0.0, **values}, structured_outputs=structured_outputs)


def _parse_draft_vocab(ctx: click.Context, param: click.Parameter, value: str | None) -> str | int | None:
    if value is None or value in ("full", "auto"):
        return value
    digits, unit = (value[:-1], 1024) if value[-1:] in ("k", "K") else (value, 1)
    if not digits.isascii() or not digits.isdigit() or int(digits) == 0:
        raise click.BadParameter(f"{value!r} is no number of tokens such as 32k, nor 'full'", ctx, param)
    return int(digits) * unit


def _parse_logit_bias(ctx: click.Context, param: click.Parameter, values: Sequence[str]) -> dict[int, float] | None:
    biases = {}
    for value in values:
        token, _, bias = value.partition("=")
        try:
            biases[int(token)] = float(bias)
        except ValueError:
            raise click.BadParameter(f"{value!r} is not of the form TOKEN_ID=BIAS", ctx, param) from None
    return biases or None


def shown(name: str, owner: type[Any] = EngineOptions) -> str:
    """What `--help` says of a default."""
    of_name: Mapping[str, Field[Any]] = {field.name: field for field in fields(owner)}
    default = of_name[name].default
    return "" if default is MISSING else f" [default: {default}]"
