"""The body of /v1/chat/completions."""

from typing import Any, ClassVar

from pydantic import Field, ValidationInfo, field_validator

from services.frontend.http.schemas.fields import Flag, WholeNumber
from services.frontend.http.schemas.generation import GenerationFields
from services.frontend.prompts.messages import ChatMessage
from shared.sampling_params import MAX_LOGPROBS


class ChatCompletionRequest(GenerationFields):
    """OpenAI's chat completions, with vLLM's additions."""

    unsupported: ClassVar[dict[str, str]] = {
        **GenerationFields.unsupported,
        "functions": "function calling is not supported yet",
        "function_call": "function calling is not supported yet",
        "audio": "audio is not supported",
        "web_search_options": "web search is not supported",
        "chat_template": "the template is the server's (--chat-template); a request cannot bring its own",
    }

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: WholeNumber | None = Field(
        None, ge=0, description="Tokens at most, thinking included; all that fit the context by default."
    )
    max_tokens: WholeNumber | None = Field(None, ge=0, description="The older name of max_completion_tokens.")
    logprobs: Flag | None = False
    top_logprobs: WholeNumber | None = Field(None, ge=0, le=MAX_LOGPROBS, description="Needs logprobs.")

    add_generation_prompt: Flag = True
    continue_final_message: Flag = False
    add_special_tokens: Flag = Field(False, description="Add what the tokenizer puts around texts to the template's.")
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="Variables for the chat template.")
    documents: list[dict[str, str]] | None = Field(None, description="For templates that know documents.")
    echo: Flag | None = Field(False, description="Begin the answer with the last message, if it is an assistant's.")
    include_reasoning: Flag | None = Field(True, description="False leaves the thinking out of the answer.")
    reasoning_effort: str | None = Field(None, description="Reaches the chat template as a variable.")

    tool_choice: Any = Field(None, description="none or auto.", json_schema_extra={"enum": ["none", "auto", None]})
    tools: list[Any] | None = Field(None, description="Not supported yet, unless tool_choice is none.")
    parallel_tool_calls: Any = Field(None, description="Accepted; changes nothing.")
    modalities: list[str] | None = Field(
        None,
        description='Only ["text"].',
        json_schema_extra={"anyOf": [{"const": ["text"]}, {"type": "null"}]},
    )
    prediction: Any = Field(None, description="Accepted; changes nothing.")
    verbosity: Any = Field(None, description="Accepted; changes nothing.")

    @field_validator("tool_choice")
    @classmethod
    def _no_forced_tool(cls, value: Any) -> Any:
        if value not in (None, "none", "auto"):
            raise ValueError("must be none or auto: tool calling is not supported yet")
        return value

    @field_validator("tools")
    @classmethod
    def _no_tools(cls, value: list[Any] | None, info: ValidationInfo) -> list[Any] | None:
        if value and info.data.get("tool_choice") != "none":
            raise ValueError("are not supported yet: leave them out, or send tool_choice none")
        return value

    @field_validator("modalities")
    @classmethod
    def _only_text_out(cls, value: list[str] | None) -> list[str] | None:
        if value is not None and value != ["text"]:
            raise ValueError('must be ["text"]: nothing else is supported')
        return value
