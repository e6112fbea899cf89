"""Requests to sampling parameters. What cannot be honoured is refused by name rather than ignored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from foredraft.errors import ParameterError, PromptTooLongError
from foredraft.models.messages import joined_text
from foredraft.server.protocol import ChatCompletionRequest, CompletionRequest, GenerationRequest
from foredraft.types import SamplingParams

_SAME_NAME = (
    *("n", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "min_tokens", "ignore_eos"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)

#: Fields of OpenAI and vLLM that would change the answer -> the value that changes nothing.
_UNSUPPORTED: Mapping[str, Any] = {
    "functions": None,
    "function_call": None,
    "audio": None,
    "use_beam_search": False,
    "bad_words": [],
    "allowed_token_ids": None,
    "prompt_logprobs": None,
    "truncate_prompt_tokens": None,
    "include_stop_str_in_output": False,
    "skip_special_tokens": True,
    "continue_final_message": False,
    "chat_template": None,
    "documents": None,
    "logits_processors": None,
    "suffix": "",  # of a chat
    "guided_whitespace_pattern": None,
}

#: Earlier names of vLLM's -> where the same goes now.
_MOVED: Mapping[str, str] = {
    "guided_json": "structured_outputs.json",
    "guided_regex": "structured_outputs.regex",
    "guided_choice": "structured_outputs.choice",
    "guided_grammar": "structured_outputs.grammar",
}


def chat_params(body: ChatCompletionRequest, max_completion_tokens: int | None) -> SamplingParams:
    """max_completion_tokens: the server's limit. Raises ParameterError with the client's name of the field."""
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    if body.top_logprobs is not None and not body.logprobs:
        raise ParameterError("top_logprobs", "needs logprobs to be true")
    own = {
        "max_tokens": _limited(name, getattr(body, name), max_completion_tokens),
        "logprobs": (body.top_logprobs or 0) if body.logprobs else None,
    }
    return _make_params(body, own, {"max_tokens": name, "logprobs": "top_logprobs"})


def completion_params(body: CompletionRequest, max_completion_tokens: int | None) -> SamplingParams:
    """As `chat_params`."""
    if body.suffix:
        raise ParameterError(
            "suffix", "is not supported: models fill in the middle by tokens of their own in the prompt (parse_special)"
        )
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise ParameterError("best_of", "other than n is not supported: every choice is returned")
    if body.echo and body.logprobs is not None:
        raise ParameterError("echo", "with logprobs is not supported: prompts are not scored")
    own = {"max_tokens": _limited("max_tokens", body.max_tokens, max_completion_tokens), "logprobs": body.logprobs}
    return _make_params(body, own, {})


def _make_params(body: GenerationRequest, own: Mapping[str, Any], names: Mapping[str, str]) -> SamplingParams:
    """names: the engine's names of fields -> the client's."""
    unknown = body.model_extra or {}
    for field, harmless in _UNSUPPORTED.items():
        if unknown.get(field) not in (None, harmless):
            raise ParameterError(field, "is not supported")
    for field, place in _MOVED.items():
        if unknown.get(field) is not None:
            raise ParameterError(field, f"is not supported; use {place}")
    given = {name: value for name in _SAME_NAME if (value := getattr(body, name)) is not None}
    if body.logit_bias is not None:
        given["logit_bias"] = {_token_id(token): bias for token, bias in body.logit_bias.items()}
    if body.prediction is not None:
        given["prediction"] = joined_text(body.prediction.model_dump()["content"], "prediction.content")
    if body.speculation is not None:
        options = body.speculation
        given["num_speculative_tokens"] = options.num_speculative_tokens if options.enabled else 0
        given["drafters"] = options.drafters
    with blamed(names):
        return SamplingParams(**given, **own)


@contextmanager
def blamed(names: Mapping[str, str]) -> Iterator[None]:
    """Errors tell of the client's fields. names: the engine's -> the client's."""
    try:
        yield
    except ParameterError as error:
        name = names.get(error.field, error.field)
        raise ParameterError(name, str(error).removeprefix(error.field + " ")) from error
    except PromptTooLongError as error:
        raise PromptTooLongError(str(error), names.get(error.field, error.field)) from error


def _limited(name: str, asked: int | None, limit: int | None) -> int | None:
    if asked is not None and limit is not None and asked > limit:
        raise ParameterError(name, f"must be at most {limit} on this server")
    return limit if asked is None else asked


def _token_id(text: str) -> int:
    if not text.isascii() or not text.isdecimal():
        raise ParameterError("logit_bias", f"has {text[:40]!r} for a token id: use whole numbers")
    return int(text[:20])
