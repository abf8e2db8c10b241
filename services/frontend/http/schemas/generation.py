"""The fields that chat and text completions share. OpenAI's meanings where OpenAI has the field, vLLM's otherwise.

Ranges that the sampler must hold anyway are checked once, in shared/sampling_params.py.
"""

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from services.frontend.http.schemas.fields import (
    Flag,
    ListOf,
    LogitBias,
    Number,
    RequestBody,
    StopStrings,
    TokenIdList,
    WholeNumber,
)
from services.frontend.http.schemas.structured import ResponseFormat, StructuredOutputs
from shared.sampling_params import MAX_LIST_LENGTH, MAX_LOGPROBS


class StreamOptions(BaseModel):
    """What a stream carries besides its text."""

    model_config = ConfigDict(extra="allow")
    include_usage: Flag | None = Field(False, description="A last chunk with the usage and no choices.")
    continuous_usage_stats: Flag | None = Field(False, description="The usage so far on every chunk (vLLM).")


class GenerationFields(RequestBody):
    """Shared by /v1/chat/completions and /v1/completions. Unknown fields are accepted and ignored."""

    unsupported: ClassVar[dict[str, str]] = {
        "logits_processors": "logits processors cannot be sent with a request",
        "use_beam_search": "beam search is not supported",
        "prompt_embeds": "prompt embeddings are not supported",
    }

    model: str | None = Field(None, description="May be left out where the server has one model.")
    stream: Flag | None = False
    stream_options: StreamOptions | None = None
    n: WholeNumber | None = Field(1, ge=1, description="Choices for each prompt.")
    stop: StopStrings | None = Field(None, description="The text ends before the first of these.")
    seed: WholeNumber | None = Field(None, description="The same seed and request give the same tokens; -1 draws one.")

    temperature: Number | None = Field(None, ge=0, le=100, description="By default the model's own, or 1; 0 is greedy.")
    top_p: Number | None = Field(None, gt=0, le=1, description="By default the model's own, or 1.")
    top_k: WholeNumber | None = Field(None, ge=-1, description="-1 and 0 are off. By default the model's own, or off.")
    min_p: Number | None = Field(None, ge=0, le=1, description="By default the model's own, or 0.")
    frequency_penalty: Number | None = Field(0.0, ge=-2, le=2)
    presence_penalty: Number | None = Field(0.0, ge=-2, le=2)
    repetition_penalty: Number | None = Field(None, ge=0.01, le=100, description="By default the model's own, or 1.")
    logit_bias: LogitBias | None = None
    allowed_token_ids: TokenIdList | None = Field(None, max_length=MAX_LIST_LENGTH)
    # Each may be banned in two spellings.
    bad_words: ListOf[str] | None = Field(None, max_length=MAX_LIST_LENGTH // 2)

    min_tokens: WholeNumber | None = Field(0, ge=0)
    stop_token_ids: TokenIdList | None = Field(None, max_length=MAX_LIST_LENGTH)
    ignore_eos: Flag | None = False
    include_stop_str_in_output: Flag | None = False
    skip_special_tokens: Flag | None = True
    spaces_between_special_tokens: Flag | None = True
    truncate_prompt_tokens: WholeNumber | None = Field(
        None, ge=-1, description="Keep this many of the prompt's last tokens; -1 keeps as many as fit."
    )
    prompt_logprobs: WholeNumber | None = Field(None, ge=0, le=MAX_LOGPROBS, description="Not with stream.")
    return_tokens_as_token_ids: Flag | None = Field(False, description='Logprobs name tokens "token_id:42".')
    return_token_ids: Flag | None = Field(False, description="Prompt and output token ids in the answer.")

    priority: WholeNumber | None = Field(0, ge=-(2**31), lt=2**31, description="Lower runs first.")
    cache_salt: str | None = Field(
        None, min_length=1, max_length=1024, description="Requests share cached prefixes only with equal salts."
    )
    timeout: Number | None = Field(
        None, gt=0, le=86_400, description="Seconds until the request is given up and answered 504."
    )

    response_format: ResponseFormat | None = Field(None, description="Text by default.")
    structured_outputs: StructuredOutputs | None = Field(None, description="What the output must look like (vLLM).")
    guided_json: dict[str, Any] | str | None = Field(None, description="vLLM's older name of structured_outputs.json.")
    guided_regex: str | None = Field(None, min_length=1, description="The older structured_outputs.regex.")
    guided_choice: ListOf[str] | None = Field(None, min_length=1, description="The older structured_outputs.choice.")
    guided_grammar: str | None = Field(None, min_length=1, description="The older structured_outputs.grammar.")
    user: Any = Field(None, description="Accepted; changes nothing.")
    metadata: Any = Field(None, description="Accepted; changes nothing.")
    store: Any = Field(None, description="Accepted; changes nothing.")
    service_tier: Any = Field(None, description="Accepted; changes nothing.")
    safety_identifier: Any = Field(None, description="Accepted; changes nothing.")
    prompt_cache_key: Any = Field(None, description="Accepted; changes nothing.")

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return (
            self.include_usage and self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)
        )
