"""What the routes answer, for the OpenAPI schema. The answers themselves are written by hand, for speed; the tests
hold them against these models."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class ResponseBody(BaseModel):
    model_config = ConfigDict(extra="forbid", protected_namespaces=())


class ErrorDetail(ResponseBody):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(ResponseBody):
    error: ErrorDetail


class PromptTokensDetails(ResponseBody):
    cached_tokens: int


class CompletionTokensDetails(ResponseBody):
    reasoning_tokens: int


class UsageBody(ResponseBody):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | None = None


class TopLogprob(ResponseBody):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(ResponseBody):
    content: list[TokenLogprob]
    refusal: None


class CalledFunction(ResponseBody):
    name: str
    arguments: str


class MessageToolCall(ResponseBody):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(ResponseBody):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[MessageToolCall] | None = None


class PromptLogprob(ResponseBody):
    logprob: float
    rank: int
    decoded_token: str


class ChatChoice(ResponseBody):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: int | str | None
    token_ids: list[int] | None = None


class ChatCompletion(ResponseBody):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageBody
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None
    prompt_token_ids: list[int] | None = None


class CompletionLogprobsBody(ResponseBody):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(ResponseBody):
    index: int
    text: str
    logprobs: CompletionLogprobsBody | None
    finish_reason: Literal["stop", "length"]
    stop_reason: int | str | None
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None


class Completion(ResponseBody):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: UsageBody


class ModelCard(ResponseBody):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int | None


class ModelList(ResponseBody):
    object: Literal["list"]
    data: list[ModelCard]


class Tokenized(ResponseBody):
    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(ResponseBody):
    prompt: str


class EngineCard(ResponseBody):
    model: str
    address: str
    state: Literal["connecting", "ready", "draining", "leaving", "refused"]
    boot_id: str
    running_requests: int
    waiting_requests: int
    waiting_tokens: int
    kv_blocks_free: int
    kv_blocks_total: int
    block_size: int
    tokens_per_second: float
    in_flight: int


class EngineList(ResponseBody):
    object: Literal["list"]
    data: list[EngineCard]


class Version(ResponseBody):
    version: str


class Health(ResponseBody):
    status: Literal["alive", "ready", "draining", "no engine"]
    models: dict[str, bool] | None = None
    engines_without_link: dict[str, int] | None = None


def schema_of(model: type[BaseModel]) -> dict[str, Any]:
    """A reference to the model's schema in the document's components."""
    return {"$ref": f"#/components/schemas/{model.__name__}"}
