"""POST /v1/completions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fastapi import Request
from starlette.responses import Response

from foredraft.models.base import TextTokenizer
from foredraft.server.answers import Answer, TextChoice, TextCompletion
from foredraft.server.constraints import wanted_format
from foredraft.server.generation import respond
from foredraft.server.prompts import text_prompts
from foredraft.server.protocol import CompletionRequest
from foredraft.server.sampling import blamed, completion_params
from foredraft.server.service import off_loop, service_of, size_of
from foredraft.server.tokens import TokenTexts, completion_logprobs, decode
from foredraft.types import Chunk, Completion


async def create_completion(body: CompletionRequest, request: Request) -> Response:
    """Continues texts, at once or as a stream of events. Choice j of prompt i has index i * n + j."""
    service = service_of(request)
    service.model_name(body.model)
    params = completion_params(body, service.config.max_completion_tokens)
    tokenizer, size = service.tokenizer, size_of(request)
    prompts = await text_prompts(tokenizer, body, size, service.engine.generator.refuse_overlong)
    echoes = await off_loop(size, lambda: [decode(tokenizer, prompt) if body.echo else "" for prompt in prompts])
    form = TextForm(tokenizer, echoes, params.n)
    with blamed({"structured_outputs": "structured_outputs" if body.structured_outputs else "response_format"}):
        params = replace(params, structured_outputs=await off_loop(size, lambda: wanted_format(body)))
        return await respond(request, body, form, prompts, params)


class TextForm:
    """echoes: by prompt, what its choices begin with; num_choices: of each prompt."""

    id_prefix = "cmpl"
    is_chat = False

    def __init__(self, tokenizer: TextTokenizer, echoes: Sequence[str], num_choices: int) -> None:
        self._tokenizer = tokenizer
        self._echoes = echoes
        self._num_choices = num_choices
        self._num_characters: defaultdict[int, int] = defaultdict(int)  # of each choice so far, for `text_offset`

    def make_choice(self, completion: Completion) -> TextChoice:
        texts = TokenTexts(self._tokenizer).add(completion.token_ids)
        echo = self._echoes[completion.index // self._num_choices]
        logprobs = completion.logprobs
        return TextChoice(
            index=completion.index,
            text=echo + completion.text,
            logprobs=None if logprobs is None else completion_logprobs(self._tokenizer, logprobs, texts, offset=0),
            finish_reason=completion.finish_reason,
        )

    def make_piece(self, chunk: Chunk, texts: Sequence[str], *, is_first: bool) -> TextChoice:
        echo = self._echoes[chunk.index // self._num_choices] if is_first else ""
        offset = self._num_characters[chunk.index]
        self._num_characters[chunk.index] += sum(map(len, texts))
        logprobs = chunk.logprobs
        return TextChoice(
            index=chunk.index,
            text=echo + chunk.text,
            logprobs=None if logprobs is None else completion_logprobs(self._tokenizer, logprobs, texts, offset),
            finish_reason=chunk.finish_reason,
        )

    def make_answer(self, choices: Sequence[Any], head: dict[str, Any], *, is_chunk: bool) -> Answer:
        return TextCompletion(**head, object="text_completion", choices=list(choices))
