"""The bodies of /tokenize and /detokenize (vLLM's)."""

from typing import Any

from pydantic import Field, model_validator

from services.frontend.http.schemas.fields import Flag, ListOf, RequestBody, TokenIdList
from services.frontend.http.schemas.tools import MAX_TOOLS, Tool
from services.frontend.prompts.messages import ChatMessage


class TokenizeRequest(RequestBody):
    """Either a prompt or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: ListOf[ChatMessage] | None = Field(None, min_length=1)
    add_special_tokens: Flag | None = Field(None, description="By default true for a prompt, false for messages.")
    add_generation_prompt: Flag = True
    continue_final_message: Flag = False
    chat_template_kwargs: dict[str, Any] | None = None
    tools: ListOf[Tool] | None = Field(None, max_length=MAX_TOOLS)
    return_token_strs: Flag | None = False

    @model_validator(mode="after")
    def _one_of_both(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("either prompt or messages must be given, and not both")
        return self


class DetokenizeRequest(RequestBody):
    """Token ids to text, special tokens included."""

    model: str | None = None
    tokens: TokenIdList
