"""What an output must look like so that its calls are what the request demands: a grammar of the model's own format,
made of the tools' schemas. For tool_choice required or a named function, and for strict functions.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from services.frontend.http.errors import ApiError, bad_request
from services.frontend.http.loaded_model import LoadedModel
from services.frontend.http.structured_output import Asked, check_grammar
from services.frontend.http.tool_use import ToolUse
from services.frontend.output.tools.grammar import CallableFunction, Marks, calls_grammar, free_grammar
from services.frontend.output.tools.registry import PARSERS
from services.frontend.structured import GrammarChecker, GrammarRefused
from services.frontend.structured.json_schema import SchemaFault, check_schema
from shared.structured_output import GRAMMAR, JSON_OBJECT, JSON_SCHEMA, StructuredOutput

# Of a schema that cannot be served with the others, so many are looked at to find the one at fault.
_MAX_BLAMED = 16
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "allOf", "oneOf", "prefixItems", "items")
_SINGLE = ("additionalProperties", "items", "additionalItems")
_ANNOTATIONS = frozenset(("title", "description", "default", "example", "examples", "$comment"))


async def tool_structure(
    tools: ToolUse, model: LoadedModel, grammars: GrammarChecker, asked: Asked | None, *, num_bytes: int
) -> StructuredOutput | None:
    """What to send to the engine; None where calls are free. `asked`: what else the request asks of its output, which
    has been checked. `num_bytes`: the length of the request. Raises ApiError."""
    answer = _answer_schema(tools, asked)
    if not tools.required and not tools.any_strict and answer is None:
        return None

    def write() -> tuple[dict[str, CallableFunction], str, str]:
        functions = _functions(tools)
        callable_functions = list(functions.values())
        as_text = _grammar(tools, model, callable_functions, answer, with_special_tokens=False)
        return functions, as_text, _grammar(tools, model, callable_functions, answer, with_special_tokens=True)

    functions, as_text, grammar = await model.prompts.run(num_bytes, write)
    try:
        # Marks that are special tokens mean something to the engine alone.
        await grammars.check(StructuredOutput(kind=GRAMMAR, value=as_text))
    except GrammarRefused as refused:
        if refused.status != 400:
            raise ApiError(refused.status, f"tools {refused.message}", retry_after=1.0) from refused
        await _blame(grammars, functions)
        raise bad_request(f"tools: the grammar that they make {refused.message}", "tools") from refused
    return StructuredOutput(kind=GRAMMAR, value=grammar)


def _answer_schema(tools: ToolUse, asked: Asked | None) -> Mapping[str, Any] | None:
    """The schema of an answer that calls nothing."""
    if asked is None:
        return None
    param, structured = asked
    if tools.required and param.startswith("response_format"):
        return None  # there will be calls and no answer
    if not tools.required and structured.kind == JSON_OBJECT:
        return {"type": "object"}
    if not tools.required and structured.kind == JSON_SCHEMA:
        schema = json.loads(structured.value)
        return schema if isinstance(schema, dict) else {}
    name = param.split(".")[0]
    raise bad_request(f"{name} cannot be combined with tools: leave one of them out", param)


def _functions(tools: ToolUse) -> dict[str, CallableFunction]:
    """Each function, by the place of its schema. Raises ApiError 400."""
    functions: dict[str, CallableFunction] = {}
    called = {tool.function.name for tool in tools.callable_tools}
    for index, tool in enumerate(tools.tools):
        if tool.function.name not in called:
            continue
        place = f"tools[{index}].function.parameters"
        enforced = tools.required or tool.function.strict
        schema = _object_schema(place, tool.function.parameters) if enforced else None
        functions[place] = CallableFunction(tool.function.name, schema)
    return functions


def _object_schema(place: str, parameters: Mapping[str, Any] | None) -> Mapping[str, Any]:
    if parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    if parameters.get("type", "object") != "object":
        raise bad_request(f"{place} must be the schema of an object", place)
    try:
        check_schema(parameters)
    except SchemaFault as fault:
        raise bad_request(f"{place}{fault.place} {fault.message}", f"{place}{fault.place}") from fault
    return {**_without_annotations(parameters), "type": "object"}


def _without_annotations(schema: Any) -> Any:
    """The schema without what only tells the model about it: the grammar does not grow with descriptions."""
    if not isinstance(schema, Mapping):
        return schema
    kept = {key: value for key, value in schema.items() if key not in _ANNOTATIONS}
    for key in _MAPS:
        if isinstance(inner := kept.get(key), Mapping):
            kept[key] = {name: _without_annotations(value) for name, value in inner.items()}
    for key in _LISTS:
        if isinstance(inner := kept.get(key), list):
            kept[key] = [_without_annotations(value) for value in inner]
    for key in _SINGLE:
        if isinstance(inner := kept.get(key), Mapping):
            kept[key] = _without_annotations(inner)
    return kept


def _grammar(
    tools: ToolUse,
    model: LoadedModel,
    functions: Sequence[CallableFunction],
    answer: Mapping[str, Any] | None,
    *,
    with_special_tokens: bool,
) -> str:
    assert model.tool_call_parser is not None
    special: dict[str, int] = {}
    if with_special_tokens:
        for mark in PARSERS[model.tool_call_parser].markers:
            token_id = model.tokenizer.token_id(mark)
            if token_id in model.tokenizer.special_token_ids:
                special[mark] = token_id
    marks = Marks(special, model.template.tools_text or "")
    try:
        if tools.required:
            return calls_grammar(model.tool_call_parser, functions, marks, parallel=tools.parallel)
        return free_grammar(model.tool_call_parser, functions, marks, answer=answer)
    except ValueError as error:
        raise bad_request(f"tools: {error}", "tools") from error


async def _blame(grammars: GrammarChecker, functions: Mapping[str, CallableFunction]) -> None:
    """Raise ApiError 400 for the first schema that cannot be served by itself."""
    enforced = [(place, function.schema) for place, function in functions.items() if function.schema is not None]
    for place, schema in enforced[:_MAX_BLAMED]:
        value = json.dumps(schema, ensure_ascii=False)
        await check_grammar(grammars, place, StructuredOutput(kind=JSON_SCHEMA, value=value))
