"""The body of /v1/chat/completions."""

from typing import Any, ClassVar

from pydantic import Field, field_validator

from services.frontend.http.schemas.fields import Document, Flag, ListOf, WholeNumber
from services.frontend.http.schemas.generation import GenerationFields
from services.frontend.http.schemas.tools import MAX_TOOLS, Tool, ToolChoice, check_tools
from services.frontend.prompts.messages import ChatMessage
from shared.sampling_params import MAX_LOGPROBS

MAX_DOCUMENTS = 1024


class ChatCompletionRequest(GenerationFields):
    """OpenAI's chat completions, with vLLM's additions."""

    unsupported: ClassVar[dict[str, str]] = {
        **GenerationFields.unsupported,
        "functions": "it is OpenAI's older form of tools: send the functions as tools",
        "audio": "audio is not supported",
        "web_search_options": "web search is not supported",
        "chat_template": "the template is the server's (--chat-template); a request cannot bring its own",
    }

    messages: ListOf[ChatMessage] = Field(min_length=1)
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
    documents: ListOf[Document] | None = Field(
        None, max_length=MAX_DOCUMENTS, description="For templates that know documents."
    )
    echo: Flag | None = Field(False, description="Begin the answer with the last message, if it is an assistant's.")
    include_reasoning: Flag | None = Field(True, description="False leaves the thinking out of the answer.")
    reasoning_effort: str | None = Field(None, description="Reaches the chat template as a variable.")

    tools: ListOf[Tool] | None = Field(None, max_length=MAX_TOOLS, description="Functions that the model may call.")
    tool_choice: ToolChoice | None = Field(
        None, description="By default auto. required and a named function are enforced; none leaves the tools out."
    )
    parallel_tool_calls: Flag | None = Field(True, description="False: the answer ends with its first call.")
    function_call: Any = Field(
        None, description="Only none or auto: send tool_choice.", json_schema_extra={"enum": ["none", "auto", None]}
    )
    modalities: ListOf[str] | None = Field(
        None,
        description='Only ["text"].',
        json_schema_extra={"anyOf": [{"const": ["text"]}, {"type": "null"}]},
    )
    prediction: Any = Field(None, description="Accepted; changes nothing.")
    verbosity: Any = Field(None, description="Accepted; changes nothing.")

    @field_validator("tools")
    @classmethod
    def _no_name_twice(cls, value: list[Tool] | None) -> list[Tool] | None:
        return check_tools(value)

    @field_validator("function_call")
    @classmethod
    def _no_forced_function(cls, value: Any) -> Any:
        if value not in (None, "none", "auto"):
            raise ValueError("is OpenAI's older form of tool_choice: send the functions as tools, and tool_choice")
        return value

    @field_validator("modalities")
    @classmethod
    def _only_text_out(cls, value: list[str] | None) -> list[str] | None:
        if value is not None and value != ["text"]:
            raise ValueError('must be ["text"]: nothing else is supported')
        return value
