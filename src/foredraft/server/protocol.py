"""What clients may send. Names are OpenAI's; what it lacks is named as in vLLM; `speculation` is our own.

A field that is null or absent leaves the engine's default. Unknown fields are tolerated, except those that would change
the answer: `sampling.refuse_unsupported` names them.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from foredraft.types import MAX_DRAFT

#: Every stop string is sought in every token, so their number and length are bounded.
StopText = Annotated[str, Field(min_length=1, max_length=512)]


class Body(BaseModel):
    """No guessing: "1" is no number and 1 no truth value."""

    model_config = ConfigDict(strict=True, extra="allow")


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # pad events to one length; None: as the server is set up


class ImageURL(Body):
    """A data URL. `detail` is not looked at: models have their own sizes."""

    url: str


class ContentPart(Body):
    """One part of a content: text or an image. Others are refused where they are read, by their type."""

    type: str
    text: str | None = None
    image_url: ImageURL | str | None = None


#: Long lists end at their first problem: to gather millions would stop the event loop for seconds.
TokenIds = Annotated[list[int], Field(fail_fast=True)]
Content = str | Annotated[list[ContentPart], Field(fail_fast=True)]


class Prediction(Body):
    """OpenAI's Predicted Outputs: text that the answer is expected to resemble."""

    type: Literal["content"] = "content"
    content: Content


class SpeculationOptions(Body):
    """How this request is drafted. The text does not depend on it for greedy and seeded requests."""

    model_config = ConfigDict(strict=True, extra="forbid")

    enabled: bool = True
    drafters: list[str] | None = Field(default=None, max_length=16)  # of those that the server runs; null: all
    num_speculative_tokens: int | None = Field(default=None, ge=0, le=MAX_DRAFT)
    origins: bool = False  # tell each token's text and who proposed it


class JSONSchemaFormat(Body):
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool = Field(default=True, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JSONSchemaFormat | None = None


class StructuredOutputsOptions(Body):
    """Exactly one of them."""

    json_: str | dict[str, Any] | None = Field(default=None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = Field(default=None, max_length=1024)
    grammar: str | None = None


class FunctionDefinition(Body):
    name: str = Field(min_length=1, max_length=64)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(Body):
    name: str


class NamedToolChoice(Body):
    type: Literal["function"]
    function: FunctionName


class GenerationRequest(Body):
    """What both ways to generate have in common."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=16)] | None = None
    stop_token_ids: list[int] | None = Field(default=None, max_length=1024)
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = Field(default=None, max_length=4096)
    user: str | None = None
    cache_salt: str | None = Field(default=None, max_length=1024)  # prompts are cached within equal salts only
    prediction: Prediction | None = None
    speculation: SpeculationOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsOptions | None = None
    return_token_ids: bool | None = None


class Message(Body):
    """One turn. Further fields (name, tool_calls, tool_call_id, reasoning_content …) reach the template as they are."""

    role: str = Field(min_length=1, max_length=64)
    content: Content | None = None


class ChatPrompt(Body):
    """What becomes a prompt through the model's chat template."""

    messages: list[Message] = Field(min_length=1, fail_fast=True)
    tools: list[Tool] | None = Field(default=None, max_length=1024)
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None


class ChatCompletionRequest(ChatPrompt, GenerationRequest):
    max_tokens: int | None = None
    max_completion_tokens: int | None = None  # wins over max_tokens
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None  # false: leave reasoning_content out


class TextOptions(Body):
    """How a text becomes tokens. parse_special: control tokens that it spells ("<|fim_prefix|>") are those tokens."""

    add_special_tokens: bool = True
    parse_special: bool = False


class CompletionRequest(TextOptions, GenerationRequest):
    prompt: (
        str
        | TokenIds
        | Annotated[list[str], Field(max_length=128, fail_fast=True)]
        | Annotated[list[TokenIds], Field(max_length=128, fail_fast=True)]
    )
    max_tokens: int | None = 16
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None


class TokenizeTextRequest(TextOptions):
    model: str | None = None
    prompt: str
    return_token_strs: bool | None = None


class TokenizeChatRequest(ChatPrompt):
    model: str | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    model: str | None = None
    tokens: TokenIds
