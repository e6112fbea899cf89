"""From a request for text to its response, for chats and completions alike: they differ in the form of a choice."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from secrets import token_hex
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from foredraft.engine.async_engine import AnswerStream
from foredraft.models.base import TextTokenizer
from foredraft.server.answers import Answer, Choice, SpeculationReport, report_speculation, report_usage, to_json
from foredraft.server.auth import prefix_salt
from foredraft.server.logs import RequestRecord
from foredraft.server.metrics import RequestTraits
from foredraft.server.protocol import GenerationRequest
from foredraft.server.service import service_of, unless_client_leaves
from foredraft.server.streaming import EventStream, StreamShape, gather_chunks, send_events
from foredraft.server.tokens import TokenTexts
from foredraft.types import Chunk, Completion, SamplingParams


class Piece(Protocol):
    """What a chunk adds to its choice."""

    token_ids: list[int] | None
    finish_reason: str | None

    @property
    def adds(self) -> bool:
        """Whether there is anything in it: a tool call's layout and a thought that is left out are nothing."""
        ...


class Form(Protocol):
    """How answers look in one of the APIs. An object serves one request."""

    id_prefix: str
    is_chat: bool

    def make_choice(self, completion: Completion) -> Choice: ...
    def make_piece(self, chunk: Chunk, texts: Sequence[str], *, is_first: bool) -> Piece:
        """What a chunk adds to its choice. texts: of its tokens; is_first: of the choice."""
        ...

    def make_answer(self, choices: Sequence[Any], head: dict[str, Any], *, is_chunk: bool) -> Answer:
        """head: id, created, model."""
        ...


@dataclass(frozen=True, slots=True)
class _Job:
    """A request that the engine works on. `completions`: the finished choices."""

    body: GenerationRequest
    form: Form
    prompts: Sequence[Sequence[int]]
    num_choices: int
    stream: AnswerStream
    tokenizer: TextTokenizer
    head: dict[str, Any]
    record: RequestRecord
    completions: dict[int, Completion] = field(default_factory=dict)

    @property
    def wants_origins(self) -> bool:
        return self.body.speculation is not None and self.body.speculation.origins

    def finish(self, index: int, completion: Completion, choice: Choice | Piece) -> None:
        """choice: as the client sees it, a call of tools where the engine saw a stop."""
        self.completions[index] = completion
        self.record.completion_tokens = (self.record.completion_tokens or 0) + completion.usage.completion_tokens
        self.record.finish_reasons.append(choice.finish_reason or completion.finish_reason)


async def respond(
    request: Request, body: GenerationRequest, form: Form, prompts: Sequence[Sequence[int]], params: SamplingParams
) -> Response:
    """Runs the prompts and answers, at once or as a stream of events. Raises what `AsyncEngine.submit` does."""
    service = service_of(request)
    model = service.model_name(body.model)
    record: RequestRecord = request.state.record
    record.model, record.prompt_tokens = model, sum(map(len, prompts))
    if service.config.log_prompts:
        record.prompt = [list(prompt) for prompt in prompts]
    tenant = getattr(request.state, "tenant", "")
    salt = prefix_salt(tenant, body.cache_salt or "", share=service.config.share_prefix_cache)
    head = {"id": f"{form.id_prefix}-{token_hex(16)}", "created": int(time.time()), "model": model}
    num_choices = len(prompts) * params.n
    traits = RequestTraits(record.prompt_tokens, form.is_chat, params.temperature)
    observer = service.metrics.begin(traits, num_choices, time.perf_counter())
    stream = await service.engine.submit(prompts, params, cache_salt=salt, observer=observer)
    job = _Job(body, form, prompts, num_choices, stream, service.tokenizer, head, record)
    if body.stream:
        shape = StreamShape.of(service.config, body.stream_options)
        return EventStream(send_events(_chunks(job, shape), shape.padding), stream)
    return await unless_client_leaves(request, _answer(job))


async def _answer(job: _Job) -> Response:
    made: dict[int, Choice] = {}
    with job.stream:
        async for chunks in job.stream:
            for chunk in chunks:
                if chunk.completion is not None:
                    made[chunk.index] = job.form.make_choice(chunk.completion)
                    job.finish(chunk.index, chunk.completion, made[chunk.index])
    completions = [job.completions[index] for index in range(job.num_choices)]
    choices = [made[index] for index in range(job.num_choices)]
    for index, (choice, completion) in enumerate(zip(choices, completions, strict=True)):
        if job.body.return_token_ids:
            choice.token_ids = list(completion.token_ids)
            choice.prompt_token_ids = list(job.prompts[index * len(job.prompts) // job.num_choices])
        if job.wants_origins:
            texts = TokenTexts(job.tokenizer).add(completion.token_ids)
            choice.speculation = SpeculationReport(tokens=texts, origins=list(completion.origins))
    answer = job.form.make_answer(choices, job.head, is_chunk=False)
    answer.usage = report_usage(job.prompts, completions)
    answer.speculation = report_speculation(completions)
    return Response(to_json(answer), media_type="application/json")


async def _chunks(job: _Job, shape: StreamShape) -> AsyncIterator[Answer]:
    """The last chunk sums up speculation. It has no choice if it also tells the usage, or if chunks tell origins."""
    wants_every_token = job.wants_origins or job.body.return_token_ids
    has_summary = shape.include_usage or job.wants_origins
    texts: dict[int, TokenTexts] = {}
    async for chunk in gather_chunks(job.stream, shape.interval):
        is_first = chunk.index not in texts
        own_texts = texts.setdefault(chunk.index, TokenTexts(job.tokenizer)).add(chunk.token_ids)
        choice = job.form.make_piece(chunk, own_texts, is_first=is_first)
        if chunk.completion is not None:
            job.finish(chunk.index, chunk.completion, choice)
        if not (choice.adds or wants_every_token or is_first):
            continue
        if job.body.return_token_ids:
            choice.token_ids = list(chunk.token_ids)
        answer = _make_chunk(job, [choice], shape)
        if job.wants_origins:
            answer.speculation = SpeculationReport(
                tokens=own_texts, origins=list(chunk.origins), num_draft_tokens=chunk.num_draft_tokens
            )
        elif len(job.completions) == job.num_choices and not has_summary:
            answer.speculation = report_speculation(job.completions.values())
        yield answer
    if has_summary:
        answer = _make_chunk(job, [], shape)
        if shape.include_usage:
            answer.usage = report_usage(job.prompts, job.completions.values())
        answer.speculation = report_speculation(job.completions.values())
        yield answer


def _make_chunk(job: _Job, choices: Sequence[Piece], shape: StreamShape) -> Answer:
    chunk = job.form.make_answer(choices, job.head, is_chunk=True)
    if shape.include_usage:
        chunk.usage = None
    return chunk
