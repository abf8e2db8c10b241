"""JSON types as strict as JSON itself: no number from a string, no integer from true, no infinity."""

from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    PlainValidator,
    WithJsonSchema,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from services.frontend.http.json_body import as_token_ids
from shared.sampling_params import MAX_LIST_LENGTH


class RequestBody(BaseModel):
    """A request's JSON. A field that it does not declare is ignored, with a warning the first time, except those
    in `unsupported` (name to reason): they would change the answer, so a request that sets one is refused."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())
    unsupported: ClassVar[dict[str, str]] = {}
    # Not a private attribute of pydantic's, which costs every request a few microseconds.
    __slots__ = ("num_bytes",)

    def with_num_bytes(self, num_bytes: int) -> Self:
        """`num_bytes`: the length of the JSON that this was; none of its strings has more characters."""
        object.__setattr__(self, "num_bytes", num_bytes)
        return self

    @classmethod
    def reads(cls, name: str) -> bool:
        """Whether anything is done with what a field of this name holds."""
        field = cls.model_fields.get(name)
        return field is not None and field.annotation is not Any

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        schema = handler(core_schema)
        for field in handler.resolve_ref_schema(schema).get("properties", {}).values():
            _name_bounds(field)
        return schema


def _name_bounds(schema: JsonSchemaValue) -> None:
    # Where a validator runs before its bounds, pydantic gives them names that JSON Schema does not know.
    for branch in schema.get("anyOf", (schema,)):
        for name, keyword in (("ge", "minimum"), ("le", "maximum"), ("lt", "exclusiveMaximum")):
            if name in branch:
                branch[keyword] = branch.pop(name)


def _whole(value: Any) -> Any:
    # Some languages write every number with a point.
    return int(value) if isinstance(value, float) and value.is_integer() else value


Item = TypeVar("Item")
# Only the first thing that is wrong is told: all of them, in a long list, take long to find.
ListOf = Annotated[list[Item], Field(fail_fast=True)]

Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
# Python would compute with more digits, but not always write them out again.
WholeNumber = Annotated[int, BeforeValidator(_whole), Field(strict=True, ge=-(2**63), lt=2**63)]
Flag = Annotated[bool, Field(strict=True)]


def _token_ids(value: Any) -> list[int]:
    token_ids = as_token_ids(value)
    if token_ids is None:
        raise ValueError("must be a list of token ids (whole numbers)")
    return token_ids


TokenIdList = Annotated[
    list[int],
    PlainValidator(_token_ids),
    WithJsonSchema({"type": "array", "items": {"type": "integer", "minimum": 0}}),
]


def _stop(value: Any) -> list[str]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise ValueError("must be a string or a list of strings")
    if "" in stops:
        raise ValueError("must not hold an empty string: leave stop out, or send null or [], for no stop")
    return stops


StopStrings = Annotated[
    list[str],
    PlainValidator(_stop),
    WithJsonSchema(
        {"anyOf": [{"type": "string", "minLength": 1}, {"type": "array", "items": {"type": "string", "minLength": 1}}]}
    ),
]


def _prompt(value: Any) -> list[str | list[int]]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(isinstance(item, str) for item in value):
            return value
        token_ids = as_token_ids(value)
        if token_ids is not None:
            return [token_ids]
        prompts: list[str | list[int]] = []
        for item in value:
            token_ids = as_token_ids(item)
            if token_ids is None:
                break
            prompts.append(token_ids)
        else:
            return prompts
    raise ValueError("must be a string, a list of strings, a list of token ids, or a list of lists of token ids")


Prompts = Annotated[
    list[str | list[int]],
    PlainValidator(_prompt),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, "minItems": 1},
                {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
                {
                    "type": "array",
                    "items": {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
                    "minItems": 1,
                },
            ]
        }
    ),
]


def _logit_bias(value: Any) -> dict[int, float]:
    if not isinstance(value, dict):
        raise ValueError("must be an object from token ids to biases")
    if len(value) > MAX_LIST_LENGTH:
        raise ValueError(f"must have at most {MAX_LIST_LENGTH} token ids, not {len(value)}")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        # JSON's keys are strings; int() alone would also take "１", "1_0" and " 1".
        if not (key.isascii() and key.isdigit() and len(key) <= 18):
            raise ValueError(f"has the key {key[:64]!r}, which is no token id")
        if isinstance(bias, bool) or not isinstance(bias, (int, float)):
            raise ValueError(f"has a bias for token id {key} that is no number")
        if not -100 <= bias <= 100:
            raise ValueError(f"has a bias for token id {key} that is not from -100 to 100")
        biases[int(key)] = float(bias)
    return biases


def _document(value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        raise ValueError("must be an object of texts")
    for name, text in value.items():
        if not isinstance(text, str):
            raise ValueError(f"must have a text under {name[:64]!r}")
    return value


Document = Annotated[
    dict[str, str],
    PlainValidator(_document),
    WithJsonSchema({"type": "object", "additionalProperties": {"type": "string"}}),
]

LogitBias = Annotated[
    dict[int, float],
    PlainValidator(_logit_bias),
    WithJsonSchema({"type": "object", "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}}),
]
