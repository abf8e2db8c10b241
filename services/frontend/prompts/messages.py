"""A conversation as clients send it (OpenAI's messages), and as chat templates read it."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from services.frontend.prompts.errors import InvalidPrompt

MAX_TOOL_CALLS = 256  # of one message

_TEXT_PARTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_MEDIA_PARTS = {
    "image": "images",
    "image_url": "images",
    "input_image": "images",
    "image_pil": "images",
    "image_embeds": "images",
    "input_audio": "audio",
    "audio_url": "audio",
    "video_url": "video",
    "file": "files",
    "input_file": "files",
}

_CONTENT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "items": {
                "anyOf": [
                    {"type": "string"},
                    {
                        "type": "object",
                        "properties": {
                            "type": {"type": "string", "enum": ["text", "input_text", "output_text"]},
                            "text": {"type": "string"},
                        },
                        "required": ["type", "text"],
                    },
                    {
                        "type": "object",
                        "properties": {
                            "type": {"type": "string", "const": "refusal"},
                            "refusal": {"type": "string"},
                        },
                        "required": ["type", "refusal"],
                    },
                ]
            },
        },
        {"type": "null"},
    ],
    "default": None,
    "description": "Text, or a list of text parts, which are joined by line breaks.",
}


def _plain_content(value: Any) -> str | None:
    """Content as one string: parts are joined by line breaks, as vLLM does for templates that take strings."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of text parts")
    return "\n".join(_part_text(number, part) for number, part in enumerate(value))


def _part_text(number: int, part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str):
        raise ValueError(f'part {number} must be an object such as {{"type": "text", "text": "…"}}')
    if kind in _MEDIA_PARTS:
        raise ValueError(f"part {number} is of type {kind}: {_MEDIA_PARTS[kind]} are not supported, only text is")
    if kind not in _TEXT_PARTS:
        raise ValueError(f"part {number} has the unknown type {kind[:64]!r}: only text parts are supported")
    text = part.get(_TEXT_PARTS[kind])
    if not isinstance(text, str):
        raise ValueError(f"part {number} must have a string in {_TEXT_PARTS[kind]!r}")
    return text


class FunctionCall(BaseModel):
    """What an assistant called, in the history."""

    model_config = ConfigDict(extra="allow")
    name: str
    arguments: str | dict[str, Any] | None = Field("", description="JSON as text, as answers have it, or an object.")


class ToolCall(BaseModel):
    """One call of an assistant message in the history."""

    model_config = ConfigDict(extra="allow")
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class ChatMessage(BaseModel):
    """One message of a conversation. Further fields reach the chat template as they are."""

    model_config = ConfigDict(extra="allow")
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Annotated[str | None, BeforeValidator(_plain_content), WithJsonSchema(_CONTENT_SCHEMA)] = None
    name: str | None = None
    reasoning: str | None = Field(None, description="An assistant's earlier thinking; reasoning_content is the same.")
    reasoning_content: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = Field(None, max_length=MAX_TOOL_CALLS)
    tool_call_id: str | None = None


def template_messages(messages: Sequence[ChatMessage], *, developer_role: bool) -> list[dict[str, Any]]:
    """The messages as a chat template reads them: no nulls, content always a string, tool arguments as objects.

    `developer_role` says that the template knows the role; otherwise developer messages become system ones.
    Raises InvalidPrompt where a message lacks the content that its role needs.
    """
    return [
        _template_message(number, message, developer_role=developer_role) for number, message in enumerate(messages)
    ]


def _template_message(number: int, message: ChatMessage, *, developer_role: bool) -> dict[str, Any]:
    fields = message.model_dump(exclude_none=True)
    if message.content is None:
        # An assistant may have only reasoned, called a tool, or been cut off before it said anything.
        if message.role != "assistant":
            raise InvalidPrompt(f"content must be given for the role {message.role}", f"messages[{number}].content")
        fields["content"] = ""
    if message.role == "developer" and not developer_role:
        fields["role"] = "system"
    reasoning = message.reasoning if message.reasoning is not None else message.reasoning_content
    if reasoning is not None:
        # Templates read one name or the other.
        fields["reasoning"] = fields["reasoning_content"] = reasoning
    for call in fields.get("tool_calls", ()):
        call["function"]["arguments"] = _arguments(call["function"].get("arguments"))
    return fields


def _arguments(arguments: str | dict[str, Any] | None) -> Any:
    # Templates write the arguments with `tojson`, which would quote a string once more.
    if not arguments:
        return {}
    if isinstance(arguments, dict):
        return arguments
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    if not isinstance(parsed, dict) or (r"\u" in arguments and not _is_unicode(parsed)):
        return arguments
    return parsed


def _is_unicode(value: Any) -> bool:
    """Whether all of its text has a UTF-8 form. Escapes may write half a character, as models do now and then."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except (UnicodeEncodeError, RecursionError):
        return False
    return True
