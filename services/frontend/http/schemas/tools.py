"""Tools as clients offer them, and which of them they want called."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema, field_validator

from services.frontend.http.schemas.fields import Flag

MAX_TOOLS = 1024
# OpenAI takes letters, digits, _ and - only; servers of tools write more, and it does no harm.
_NAME_PATTERN = r"^[A-Za-z0-9_.:/-]{1,256}$"


class FunctionDefinition(BaseModel):
    """A function that the model may call. Further fields reach the chat template as they are."""

    model_config = ConfigDict(extra="allow")
    name: str = Field(
        description="1 to 256 letters, digits, and _ - . : /", json_schema_extra={"pattern": _NAME_PATTERN}
    )
    description: str | None = None
    parameters: dict[str, Any] | None = Field(None, description="A JSON Schema of an object; none: no arguments.")
    strict: Flag | None = Field(False, description="Have the arguments follow the schema exactly.")

    @field_validator("name")
    @classmethod
    def _only_plain_characters(cls, value: str) -> str:
        # Names stand in grammars and between the marks of the models' formats.
        if not 1 <= len(value) <= 256 or not all(
            char.isascii() and (char.isalnum() or char in "_-.:/") for char in value
        ):
            raise ValueError("must have 1 to 256 characters: letters, digits, and _ - . : /")
        return value


class Tool(BaseModel):
    """OpenAI's function tool."""

    model_config = ConfigDict(extra="allow")
    type: Literal["function"]
    function: FunctionDefinition

    def for_template(self) -> dict[str, Any]:
        """As chat templates read it: what the client sent, without what only this server needs."""
        return self.model_dump(exclude_unset=True, exclude={"function": {"strict"}})


class NamedTool(BaseModel):
    """The one function that must be called."""

    name: str


def _tool_choice(value: Any) -> str | NamedTool:
    match value:
        case "none" | "auto" | "required":
            return value
        case {"type": "function", "function": {"name": str(name)}}:
            return NamedTool(name=name)
    raise ValueError('must be none, auto, required, or {"type": "function", "function": {"name": "…"}}')


ToolChoice = Annotated[
    str | NamedTool,
    PlainValidator(_tool_choice),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string", "enum": ["none", "auto", "required"]},
                {
                    "type": "object",
                    "properties": {
                        "type": {"const": "function"},
                        "function": {
                            "type": "object",
                            "properties": {"name": {"type": "string"}},
                            "required": ["name"],
                        },
                    },
                    "required": ["type", "function"],
                },
            ]
        }
    ),
]


def check_tools(tools: list[Tool] | None) -> list[Tool] | None:
    """Raise ValueError where two functions have one name: a call could not tell which of them it means."""
    names: set[str] = set()
    for tool in tools or ():
        name = tool.function.name
        if name in names:
            raise ValueError(f"name the function {name[:64]!r} twice")
        names.add(name)
    return tools
