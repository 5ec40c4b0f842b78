"""Bodies of requests: every field is checked here, and unknown fields are refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Probability = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
StopString = Annotated[str, Field(min_length=1)]
Stop = StopString | Annotated[list[StopString], Field(max_length=16)] | None
Tokens = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(fail_fast=True)]  # One error for a long list.


class Strict(BaseModel):
    """A part of a request; types as in JSON, no field besides its own, no infinite numbers."""

    # Texts of clients are not kept in the parser's cache of strings.
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, cache_strings="keys")


class StreamOptions(Strict):
    """How a stream tells usage: once at the end, or with every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class DraftreeOptions(Strict):
    """What is draftree's own: who drafts for this request, how much, and what the answer tells of it."""

    drafter: str | None = None
    node_budget: Annotated[int, Field(ge=0, le=4096)] | None = None
    stats: bool | None = None
    trees: bool | None = None
    timeout: Annotated[float, Field(gt=0)] | None = None


class JsonSchema(Strict):
    """A schema as the API names it; `strict` or not, the answer fits it."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """What the answer is: any text, a JSON object, or JSON by a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Strict):
    """vLLM's field for the same and more; one of these."""

    json_: dict[str, Any] | bool | str | None = Field(default=None, alias="json")
    json_object: Literal[True] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


_NOTHING = DraftreeOptions()  # of requests that set none


class Sampling(Strict):
    """What completions and chat completions have in common.

    Fields of the API whose only supported value is its default are typed as that value.
    """

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
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
    n: Annotated[int, Field(ge=1)] | None = None
    stop: Stop = None
    stop_token_ids: Tokens | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    user: Annotated[str, Field(max_length=512)] | None = None
    draftree: DraftreeOptions | None = None

    @property
    def own(self) -> DraftreeOptions:
        """draftree's own fields, all unset where there are none."""
        return self.draftree or _NOTHING

    @property
    def tries(self) -> int:
        """Answers to generate for each prompt."""
        return self.n or 1

    @property
    def stops(self) -> list[str]:
        """Strings that end the text."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


class Completion(Sampling):
    """Body of /v1/completions."""

    prompt: str | Tokens | list[str] | list[Tokens]
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None
    add_special_tokens: bool | None = None
    suffix: None = None

    @property
    def tries(self) -> int:
        """Answers to generate for each prompt, also those that `best_of` leaves out."""
        return self.best_of or self.n or 1


class TextPart(Strict):
    """A part of a message."""

    type: Literal["text"]
    text: str


Content = str | list[TextPart]


class Function(Strict):
    """The function of a tool, or the one that a message called."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function


class CalledFunction(Strict):
    """A function, and the arguments that the model gave it, as JSON."""

    name: str
    arguments: str
    parsed_arguments: Any = None  # what the official client has read of them; left out of the prompt


class ToolCall(Strict):
    """A call in the history of a chat."""

    id: str
    type: Literal["function"]
    function: CalledFunction
    index: int | None = None  # in a streamed answer, as the official client holds it; the order says the same


class Message(Strict):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    # Fields that clients hold of an answer and send back with it; they are empty in every answer of this server.
    refusal: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    audio: None = None
    function_call: None = None
    parsed: Any = None  # what the official client has read of the content


class Prediction(Strict):
    """What the answer is likely to say in parts, such as the file that is to be edited."""

    type: Literal["content"]
    content: Content


class NamedFunction(Strict):
    """The function that the answer is to call."""

    name: str


class NamedTool(Strict):
    """The tool that the answer is to call."""

    type: Literal["function"]
    function: NamedFunction


class Chat(Sampling):
    """Body of /v1/chat/completions."""

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
    store: Literal[False] | None = None
    service_tier: Literal["auto", "default"] | None = None
    # Of the API's, what is not here: some clients send null for all that they do not use.
    audio: None = None
    function_call: None = None
    functions: None = None
    metadata: None = None
    prompt_cache_key: None = None
    reasoning_effort: None = None
    safety_identifier: None = None
    verbosity: None = None
    web_search_options: None = None


class Tokenize(Strict):
    """Body of /tokenize: a text, or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None


class Detokenize(Strict):
    """Body of /detokenize."""

    model: str | None = None
    tokens: Tokens


class Corpus(Strict):
    """Body of /v1/corpus: texts that the trie is to draft from."""

    texts: Annotated[list[str], Field(min_length=1)]
    user: Annotated[str, Field(max_length=512)] | None = None


def plain(content: str | list[TextPart] | None) -> str:
    """The text of a message's content."""
    if isinstance(content, list):
        return "".join(part.text for part in content)
    return content or ""
