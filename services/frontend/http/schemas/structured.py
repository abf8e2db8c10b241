"""The fields that say what an output must look like: OpenAI's response_format, and vLLM's names for the same."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from services.frontend.http.schemas.fields import Flag, ListOf

MAX_STRUCTURES = 1024


class JsonSchemaFormat(BaseModel):
    """A named schema. It is enforced whether it is `strict` or not."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())
    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] | bool = Field(alias="schema")
    strict: Flag | None = None


class TagStructure(BaseModel):
    """What follows `begin`, up to `end`."""

    model_config = ConfigDict(protected_namespaces=())
    begin: str = Field(min_length=1)
    json_schema: dict[str, Any] | bool = Field(alias="schema")
    end: str = ""


class ResponseFormat(BaseModel):
    """Text as it comes, a JSON object, JSON of a schema, or text in which tags enclose JSON (vLLM)."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())
    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = Field(None, description="With type json_schema.")
    structures: ListOf[TagStructure] | None = Field(
        None, max_length=MAX_STRUCTURES, description="With type structural_tag."
    )
    triggers: ListOf[str] | None = Field(None, description="With type structural_tag: what the tags begin with.")


class StructuredOutputs(BaseModel):
    """vLLM's name for it: exactly one of these."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())
    # A model's own `json` would hide pydantic's.
    json_: dict[str, Any] | str | bool | None = Field(None, alias="json", description="A JSON Schema.")
    json_object: Flag | None = Field(None, description="Any JSON object.")
    regex: str | None = Field(None, description="The whole output matches it.")
    choice: ListOf[str] | None = Field(None, min_length=1)
    grammar: str | None = Field(None, description="Lark (llguidance's dialect) or GBNF.")
    structural_tag: str | None = Field(None, description="JSON text of `structures` and `triggers`.")
    disable_fallback: Any = Field(None, description="Accepted; changes nothing.")
    disable_any_whitespace: Any = Field(None, description="Accepted; blanks are always bounded.")

    @field_validator("*", mode="after")
    @classmethod
    def _not_empty(cls, value: Any) -> Any:
        if value == "":
            raise ValueError("must not be empty")
        return value
