"""The body of /v1/completions."""

from pydantic import Field, field_validator

from services.frontend.http.schemas.fields import Flag, Prompts, WholeNumber
from services.frontend.http.schemas.generation import GenerationFields
from shared.sampling_params import MAX_LOGPROBS


class CompletionRequest(GenerationFields):
    """OpenAI's text completions, with vLLM's additions."""

    prompt: Prompts
    max_tokens: WholeNumber | None = Field(16, ge=0, description="0 only scores a prompt (echo, prompt_logprobs).")
    logprobs: WholeNumber | None = Field(
        None, ge=0, le=MAX_LOGPROBS, description="Likeliest alternatives beside each token; with echo the prompt's too."
    )
    echo: Flag | None = Field(False, description="Begin the text with the prompt.")
    add_special_tokens: Flag = Field(True, description="What the tokenizer puts around texts, such as bos.")
    best_of: WholeNumber | None = Field(
        None, description="Only 1.", json_schema_extra={"anyOf": [{"const": 1}, {"type": "null"}]}
    )
    suffix: str | None = Field(
        None, description="Not supported.", json_schema_extra={"anyOf": [{"const": ""}, {"type": "null"}]}
    )

    @field_validator("best_of")
    @classmethod
    def _only_one(cls, value: int | None) -> int | None:
        if value is not None and value != 1:
            raise ValueError("over 1 is not supported: use n, and choose yourself")
        return value

    @field_validator("suffix")
    @classmethod
    def _no_suffix(cls, value: str | None) -> str | None:
        if value:
            raise ValueError("is not supported: text is only continued, never filled in")
        return value
