"""What clients get. Fields that were not set are left out; those set to None are null."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from pydantic import BaseModel

from foredraft.types import Completion


class CompletionTokensDetails(BaseModel):
    """Of a `prediction`: tokens drafted from it that became text, and those that did not."""

    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class PromptTokensDetails(BaseModel):
    """Tokens that an earlier prompt began with as well, so that they were not computed again."""

    cached_tokens: int = 0


class UsageReport(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class SpeculationReport(BaseModel):
    """What was drafted and accepted, all choices together; and, where asked for, the tokens with their origins."""

    num_passes: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    acceptance_rate: float = 0.0
    mean_acceptance_length: float = 1.0
    tokens_per_pass: float = 0.0
    accepted_per_position: list[int] = []
    by_drafter: dict[str, dict[str, int]] = {}
    tokens: list[str] = []  # texts; a character made of several tokens belongs to the last of them
    origins: list[str] = []  # who proposed each token: a drafter, the prediction, or the target itself


class TopLogprob(BaseModel):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprobReport(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    content: list[TokenLogprobReport]


class CompletionLogprobs(BaseModel):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class ToolCallFunction(BaseModel):
    name: str | None = None
    arguments: str = ""


class ToolCall(BaseModel):
    index: int | None = None  # in a stream
    id: str | None = None
    type: Literal["function"] = "function"
    function: ToolCallFunction


class MessageReport(BaseModel):
    """A message, or in a stream what a chunk adds to it."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class Choice(BaseModel):
    index: int
    finish_reason: str | None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    speculation: SpeculationReport | None = None  # tokens and origins, in answers that are not streamed


class ChatChoice(Choice):
    message: MessageReport
    logprobs: ChatLogprobs | None


class ChatChunkChoice(Choice):
    delta: MessageReport
    logprobs: ChatLogprobs | None

    @property
    def adds(self) -> bool:
        delta = self.delta
        has_text = bool(delta.content or delta.reasoning_content or delta.tool_calls)
        return has_text or self.logprobs is not None or self.finish_reason is not None


class TextChoice(Choice):
    text: str
    logprobs: CompletionLogprobs | None

    @property
    def adds(self) -> bool:
        return bool(self.text) or self.logprobs is not None or self.finish_reason is not None


class Answer(BaseModel):
    """`obfuscation` is padding that hides how much text an event carries."""

    id: str
    object: str
    created: int
    model: str
    usage: UsageReport | None = None
    speculation: SpeculationReport | None = None
    obfuscation: str | None = None


class ChatCompletion(Answer):
    choices: list[ChatChoice]


class ChatCompletionChunk(Answer):
    choices: list[ChatChunkChoice]


class TextCompletion(Answer):
    choices: list[TextChoice]


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "foredraft"
    root: str
    parent: None = None
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class TokenizeAnswer(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeAnswer(BaseModel):
    prompt: str


class Health(BaseModel):
    status: str


class Version(BaseModel):
    version: str


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(BaseModel):
    error: ErrorDetail


def report_usage(prompts: Sequence[Sequence[int]], completions: Iterable[Completion]) -> UsageReport:
    """Each prompt counts once, however many choices it has: as the one that found least of it in the cache."""
    completions = sorted(completions, key=lambda completion: completion.index)
    n = len(completions) // len(prompts)
    cached = [c.usage.num_cached_tokens for c in completions]
    predicted = [c.speculation.by_drafter.get("prediction", {}) for c in completions]
    drafted = sum(counts.get("draft_tokens", 0) for counts in predicted)
    accepted = sum(counts.get("accepted_tokens", 0) for counts in predicted)
    num_prompt = sum(map(len, prompts))
    num_completion = sum(c.usage.completion_tokens for c in completions)
    return UsageReport(
        prompt_tokens=num_prompt,
        completion_tokens=num_completion,
        total_tokens=num_prompt + num_completion,
        prompt_tokens_details=PromptTokensDetails(
            cached_tokens=sum(min(cached[first : first + n]) for first in range(0, len(cached), n))
        ),
        completion_tokens_details=CompletionTokensDetails(
            accepted_prediction_tokens=accepted, rejected_prediction_tokens=drafted - accepted
        ),
    )


def report_speculation(completions: Iterable[Completion]) -> SpeculationReport:
    """Sums over all choices, and the rates of the sums."""
    stats = [c.speculation for c in completions]
    num_passes = sum(s.num_passes for s in stats)
    num_drafts = sum(s.num_drafts for s in stats)
    num_draft_tokens = sum(s.num_draft_tokens for s in stats)
    accepted = sum(s.acceptance_rate * s.num_draft_tokens for s in stats)
    by_position = [s.accepted_per_position for s in stats]
    return SpeculationReport(
        num_passes=num_passes,
        num_drafts=num_drafts,
        num_draft_tokens=num_draft_tokens,
        num_accepted_tokens=sum(s.num_accepted_tokens for s in stats),
        acceptance_rate=accepted / num_draft_tokens if num_draft_tokens else 0.0,
        mean_acceptance_length=1 + accepted / num_drafts if num_drafts else 1.0,
        tokens_per_pass=sum(s.tokens_per_pass * s.num_passes for s in stats) / num_passes if num_passes else 0.0,
        accepted_per_position=[
            sum(counts[i] for counts in by_position if i < len(counts))
            for i in range(max(map(len, by_position), default=0))
        ],
        by_drafter=_sum_counts(s.by_drafter for s in stats),
    )


def _sum_counts(counts: Iterable[Mapping[str, Mapping[str, int]]]) -> dict[str, dict[str, int]]:
    total: dict[str, dict[str, int]] = {}
    for of_choice in counts:
        for drafter, named in of_choice.items():
            own = total.setdefault(drafter, {})
            for name, count in named.items():
                own[name] = own.get(name, 0) + count
    return total


def to_json(answer: BaseModel) -> bytes:
    return answer.model_dump_json(exclude_unset=True).encode()
