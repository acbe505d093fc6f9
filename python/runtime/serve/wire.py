"""What crosses the wire, as structs: the bodies that routes take and the replies that they give. Types and ranges only.

What a field means is lower.py's; which names exist beside these, and what becomes of them, is fields.py's. A name may have
several spellings here (W7): they are different fields, and lower.py lets them agree. `null` is the same as absent (W1), so every
optional field is None by default. JSON that has a meaning of its own (schemas, tools) stays Raw: its key order survives.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated, Any, Literal, Protocol

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

__all__ = [
    "Chat", "ChatChoice", "ChatReply", "Completion", "CompletionChoice", "CompletionLogprobs", "CompletionReply", "Detokenize", "Generate",
    "Generation", "Message", "Part", "ResponseFormat", "StreamOptions", "StructuredOutputs", "Tokenize", "ToolCall", "ToolFunction", "Usage",
]  # fmt: skip

INT64 = 2**63 - 1
VERSION = version("phloem")

Count = Annotated[int, Meta(ge=0, le=INT64)]
Name = Annotated[str, Meta(min_length=1, max_length=1024)]
Handle = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9._:-]+$")]


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Generation(msgspec.Struct, kw_only=True):
    """What chat, completions and the sampling_params of /generate share."""

    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    max_new_tokens: Count | None = None
    min_tokens: Count | None = None
    min_new_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=INT64)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=INT64)] | None = None
    sampling_seed: Annotated[int, Meta(ge=-(2**63), le=INT64)] | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Annotated[int, Meta(ge=-INT64, le=INT64)]] | None = None
    include_stop_str_in_output: bool | None = None
    no_stop_trim: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[Annotated[int, Meta(ge=-INT64, le=INT64)]] | None = None
    logprobs_mode: Literal["model", "sampled"] | None = None
    response_format: Raw = msgspec.field(default_factory=Raw)
    structured_outputs: Raw = msgspec.field(default_factory=Raw)
    regex: str | None = None
    ebnf: str | None = None
    json_schema: Raw = msgspec.field(default_factory=Raw)
    guided_json: Raw = msgspec.field(default_factory=Raw)
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    json_whitespace: Literal["flexible", "spaced", "compact"] | None = None
    jump_forward: Literal["canonical", "permissive", "off"] | None = None


class Call(Generation, kw_only=True):
    """What a whole body has beside its sampling: chat and completions."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    cache_salt: Name | None = None
    extra_key: Name | None = None
    priority: Annotated[int, Meta(ge=-1000, le=1000)] | None = None
    request_id: Handle | None = None
    rid: Handle | None = None


class Part(msgspec.Struct, kw_only=True):
    """A part of a message's content; only text is read."""

    type: str
    text: str | None = None


class CalledFunction(msgspec.Struct, kw_only=True):
    name: str
    arguments: str | None = None


class CalledTool(msgspec.Struct, kw_only=True):
    """A call that an assistant turn of the history made."""

    function: CalledFunction
    id: str | None = None
    type: str | None = None


class Message(msgspec.Struct, kw_only=True):
    role: str
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[CalledTool] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class Chat(Call, kw_only=True):
    messages: list[Message]
    tools: list[Raw] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Meta(max_length=64)] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    tool_choice: Raw = msgspec.field(default_factory=Raw)
    parallel_tool_calls: bool | None = None
    separate_reasoning: bool | None = None
    include_reasoning: bool | None = None


MESSAGE_NAMES = (*Message.__struct_fields__, "refusal", "annotations", "audio", "function_call", "reasoning")
"""Names of a message that are no news: read, or written by SDKs that hand back what they got."""


class Conversation(Protocol):
    """What makes a prompt of messages: of Chat, and of Tokenize. (Structs have one base.)"""

    tools: list[Raw] | None
    add_generation_prompt: bool | None
    continue_final_message: bool | None
    chat_template: str | None
    chat_template_kwargs: dict[str, Any] | None
    documents: list[dict[str, Any]] | None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None


class Completion(Call, kw_only=True):
    prompt: Raw
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None


class Generate(msgspec.Struct, kw_only=True):
    text: str | list[str] | None = None
    input_ids: Raw = msgspec.field(default_factory=Raw)
    sampling_params: Raw = msgspec.field(default_factory=Raw)
    return_logprob: bool | None = None
    logprob_start_len: Annotated[int, Meta(ge=-1, le=INT64)] | None = None
    top_logprobs_num: Annotated[int, Meta(ge=0, le=20)] | None = None
    return_text_in_logprobs: bool | None = None
    open_end: bool | None = None
    model: str | None = None
    stream: bool | None = None
    rid: Handle | list[Handle] | None = None
    cache_salt: Name | None = None
    extra_key: Name | None = None
    priority: Annotated[int, Meta(ge=-1000, le=1000)] | None = None


class Tokenize(msgspec.Struct, kw_only=True):
    prompt: str | list[str] | None = None
    messages: list[Message] | None = None
    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    tools: list[Raw] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Meta(max_length=64)] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None


class Detokenize(msgspec.Struct, kw_only=True):
    tokens: list[Annotated[int, Meta(ge=-INT64, le=INT64)]]
    model: str | None = None
    skip_special_tokens: bool | None = None


class AbortRequest(msgspec.Struct, kw_only=True):
    rid: str | None = None
    abort_all: bool | None = None


class JsonSchemaFormat(msgspec.Struct, kw_only=True):
    name: Annotated[str, Meta(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_-]+$")]
    schema: Raw = msgspec.field(default_factory=Raw)
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    """regex, pattern, ebnf, grammar: TensorRT-LLM's further types."""

    type: str
    json_schema: JsonSchemaFormat | None = None
    schema: Raw = msgspec.field(default_factory=Raw)
    regex: str | None = None
    pattern: str | None = None
    ebnf: str | None = None
    grammar: str | None = None


class StructuredOutputs(msgspec.Struct, kw_only=True):
    json: Raw = msgspec.field(default_factory=Raw)
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None


# ---- replies ------------------------------------------------------------------------------------------------------------


class PromptDetails(msgspec.Struct):
    cached_tokens: int = 0
    cache_write_tokens: int = 0


class CompletionDetails(msgspec.Struct):
    reasoning_tokens: int = 0
    forced_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class ToolFunction(msgspec.Struct):
    name: str
    arguments: str


class ToolCall(msgspec.Struct):
    id: str
    function: ToolFunction
    type: Literal["function"] = "function"


class ReplyMessage(msgspec.Struct, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[ContentLogprob]
    refusal: None = None


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: ReplyMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: str | int | None = None
    matched_stop: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET


class DroppedKeyword(msgspec.Struct):
    pointer: str
    keyword: str


class ChatReply(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | UnsetType = UNSET
    dropped_keywords: list[DroppedKeyword] | UnsetType = UNSET


class CompletionLogprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Literal["stop", "length"]
    stop_reason: str | int | None = None
    matched_stop: str | int | None = None
    prompt_token_ids: list[int] | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class CompletionReply(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage
    dropped_keywords: list[DroppedKeyword] | UnsetType = UNSET


class ErrorDetail(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str


class ErrorReply(msgspec.Struct):
    error: ErrorDetail
