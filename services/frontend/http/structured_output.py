"""From the fields of a request to the one structured output that they ask for, checked before anything is queued."""

import json
from collections.abc import Iterator
from typing import Any

from services.frontend.http.errors import ApiError, bad_request
from services.frontend.http.schemas.generation import GenerationFields
from services.frontend.http.schemas.structured import ResponseFormat, StructuredOutputs
from services.frontend.structured import GrammarChecker, GrammarRefused
from shared.structured_output import (
    CHOICE,
    GRAMMAR,
    JSON_OBJECT,
    JSON_SCHEMA,
    REGEX,
    STRUCTURAL_TAG,
    StructuredOutput,
)

# What vLLM knows and would change the answer.
_UNSUPPORTED = ("whitespace_pattern", "disable_additional_properties")

Asked = tuple[str, StructuredOutput]  # the field's path, and what it asks for


def asked_structured_output(request: GenerationFields) -> Asked | None:
    """What the request asks for. Raises ApiError 400 where it asks for more than one."""
    asked = [
        *_in_response_format(request.response_format),
        *_in_structured_outputs(request.structured_outputs),
        *_in_guided(request),
    ]
    if not asked:
        return None
    if len(asked) > 1:
        names = " and ".join(param for param, _ in asked)
        raise bad_request(f"an output can follow one structure only, not {names}", asked[1][0])
    return asked[0]


def _in_response_format(given: ResponseFormat | None) -> Iterator[Asked]:
    if given is None or given.type == "text":
        return
    if given.type == "json_object":
        yield "response_format", StructuredOutput(kind=JSON_OBJECT)
    elif given.type == "json_schema":
        if given.json_schema is None:
            raise bad_request("response_format.json_schema is required", "response_format.json_schema")
        yield "response_format.json_schema.schema", _json(JSON_SCHEMA, given.json_schema.json_schema)
    else:
        if not given.structures or not given.triggers:
            raise bad_request("response_format needs structures and triggers", "response_format.structures")
        tags = {
            "structures": [structure.model_dump(by_alias=True) for structure in given.structures],
            "triggers": given.triggers,
        }
        yield "response_format", _json(STRUCTURAL_TAG, tags)


def _in_structured_outputs(given: StructuredOutputs | None) -> Iterator[Asked]:
    if given is None:
        return
    for name in _UNSUPPORTED:
        if (given.model_extra or {}).get(name):
            raise bad_request(f"structured_outputs.{name} is not supported", f"structured_outputs.{name}")
    field = "structured_outputs"
    values: list[Asked] = []
    if given.json_ is not None:
        values.append((f"{field}.json", _schema(given.json_)))
    if given.json_object:
        values.append((f"{field}.json_object", StructuredOutput(kind=JSON_OBJECT)))
    for name, kind, value in (
        ("regex", REGEX, given.regex),
        ("grammar", GRAMMAR, given.grammar),
        ("structural_tag", STRUCTURAL_TAG, given.structural_tag),
    ):
        if value is not None:
            values.append((f"{field}.{name}", StructuredOutput(kind=kind, value=value)))
    if given.choice is not None:
        values.append((f"{field}.choice", _json(CHOICE, given.choice)))
    if len(values) != 1:
        raise bad_request(
            f"{field} must have exactly one of json, json_object, regex, choice, grammar and structural_tag, "
            f"not {len(values)} of them",
            field,
        )
    yield values[0]


def _in_guided(request: GenerationFields) -> Iterator[Asked]:
    if request.guided_json is not None:
        yield "guided_json", _schema(request.guided_json)
    if request.guided_regex is not None:
        yield "guided_regex", StructuredOutput(kind=REGEX, value=request.guided_regex)
    if request.guided_choice is not None:
        yield "guided_choice", _json(CHOICE, request.guided_choice)
    if request.guided_grammar is not None:
        yield "guided_grammar", StructuredOutput(kind=GRAMMAR, value=request.guided_grammar)


def _schema(schema: dict[str, Any] | str | bool) -> StructuredOutput:
    return StructuredOutput(kind=JSON_SCHEMA, value=schema) if isinstance(schema, str) else _json(JSON_SCHEMA, schema)


def _json(kind: str, value: Any) -> StructuredOutput:
    # Its order is the client's: properties are written in it.
    return StructuredOutput(kind=kind, value=json.dumps(value, ensure_ascii=False, separators=(",", ":")))


async def check_grammar(grammars: GrammarChecker, param: str, structured: StructuredOutput) -> StructuredOutput:
    """What to send to the engine. Raises ApiError: 400 names the field, and the place in it."""
    try:
        return await grammars.check(structured)
    except GrammarRefused as refused:
        if refused.status != 400:
            raise ApiError(refused.status, f"{param} {refused.message}", retry_after=1.0) from refused
        param += refused.place
        raise bad_request(f"{param} {refused.message}", param) from refused
