"""Define the bodies of requests; unknown fields are refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Probability = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
StopString = Annotated[str, Field(min_length=1)]
Stop = StopString | Annotated[list[StopString], Field(max_length=16)] | None
Tokens = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(fail_fast=True)]  # One error for a long list.


class Strict(BaseModel):
    """Check JSON types, refuse unknown fields and infinite numbers; a null is no field, as some clients send many."""

    # The parser's cache must not hold texts of clients.
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, cache_strings="keys")

    @model_validator(mode="before")
    @classmethod
    def without_nulls(cls, given: Any) -> Any:
        """Drop fields that are null."""
        return {n: v for n, v in given.items() if v is not None} if isinstance(given, dict) else given


class StreamOptions(Strict):
    """Request usage once at the end of a stream, or with every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None  # Without effect: streams have no padding.


class DraftreeOptions(Strict):
    """Set drafting, statistics and the timeout of one request."""

    drafter: str | None = None
    node_budget: Annotated[int, Field(ge=0, le=4096)] | None = None
    stats: bool | None = None
    trees: bool | None = None
    timeout: Annotated[float, Field(gt=0)] | None = None


class JsonSchema(Strict):
    """Name a schema; the output fits it, `strict` or not."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """Choose the form of the output: text, a JSON object, or JSON by a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Strict):
    """Choose one form of the output, by vLLM's names."""

    json_: dict[str, Any] | bool | str | None = Field(default=None, alias="json")
    json_object: Literal[True] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


_NOTHING = DraftreeOptions()


class Unused(Strict):
    """Define the fields that cannot change the text: they have no effect, and a header of the response names them."""

    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None

    @property
    def unused(self) -> list[str]:
        """Return the names of the given ones."""
        return [name for name in Unused.model_fields if getattr(self, name) is not None]


class Common(Unused):
    """Define the fields of completions, chats and responses."""

    model: str | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Probability | None = None
    typical_p: Annotated[float, Field(gt=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    seed: Seed | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Annotated[str, Field(max_length=512)] | None = None
    draftree: DraftreeOptions | None = None

    @property
    def own(self) -> DraftreeOptions:
        """Return draftree's own fields, all unset by default."""
        return self.draftree or _NOTHING


class Sampling(Common):
    """Define the fields of both completions and chats.

    Fields of the API whose only supported value is its default are typed as that value.
    """

    max_tokens: Annotated[int, Field(ge=0)] | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    stop: Stop = None
    stop_token_ids: Tokens | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    return_token_ids: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    @property
    def count(self) -> int:
        """Return the number of outputs for each prompt."""
        return self.n or 1

    @property
    def stops(self) -> list[str]:
        """Return the stop strings."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


class Completion(Sampling):
    """Define the body of /v1/completions."""

    prompt: str | Tokens | list[str] | list[Tokens]
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    best_of: Literal[1] | None = None
    add_special_tokens: bool | None = None


class TextPart(Strict):
    """Hold a text part of a message."""

    type: Literal["text"]
    text: str


Content = str | list[TextPart]


class ImageUrl(Strict):
    """Name an image, see `chat.image_at`."""

    url: str
    detail: Literal["auto", "low", "high"] | None = None  # The model's processor decides.


class ImagePart(Strict):
    """Hold an image part of a message."""

    type: Literal["image_url"]
    image_url: ImageUrl


class Function(Strict):
    """Describe the function of a tool."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    """Describe a tool that the model may call."""

    type: Literal["function"]
    function: Function


class CalledFunction(Strict):
    """Hold the name and the JSON arguments of a call."""

    name: str
    arguments: str
    parsed_arguments: Any = None  # Added by the official client; ignored.


class ToolCall(Strict):
    """Hold a call in the history of a chat."""

    id: str
    type: Literal["function"]
    function: CalledFunction
    index: int | None = None  # Added by the official client; ignored.


class Message(Strict):
    """Hold one message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart | ImagePart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None  # Of an earlier answer.
    parsed: Any = None  # Added by the official client; ignored.


class Prediction(Strict):
    """Hold text that the output is likely to repeat, such as a file to edit."""

    type: Literal["content"]
    content: Content


class NamedFunction(Strict):
    """Name the function to call."""

    name: str


class NamedTool(Strict):
    """Name the tool to call."""

    type: Literal["function"]
    function: NamedFunction


class Chat(Sampling):
    """Define the body of /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    prediction: Prediction | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    modalities: list[Literal["text"]] | None = None
    reasoning_effort: str | None = None


class Tokenize(Strict):
    """Define the body of /tokenize: a text, or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None


class Detokenize(Strict):
    """Define the body of /detokenize."""

    model: str | None = None
    tokens: Tokens


class Corpus(Strict):
    """Define the body of /v1/corpus: texts to draft from."""

    texts: Annotated[list[str], Field(min_length=1)]
    user: Annotated[str, Field(max_length=512)] | None = None


def plain(content: str | list[TextPart] | None) -> str:
    """Return the text of a message's content."""
    if isinstance(content, list):
        return "".join(part.text for part in content)
    return content or ""
