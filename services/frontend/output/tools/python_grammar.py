"""The arguments of one Python call as a grammar, from the JSON Schema that they must follow."""

from collections.abc import Callable, Mapping
from typing import Any

# What of an object's schema a call can be held to; the others of these say nothing about its arguments.
_KNOWN = frozenset(
    {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema", "$id"}
    | {"title", "description", "default", "examples", "$comment", "deprecated", "readOnly", "writeOnly"}
)


def python_arguments(name: str, schema: Mapping[str, Any] | None, as_json: Callable[[Mapping[str, Any]], str]) -> str:
    """Lark rules: `name` is the arguments in parentheses, `inside_name` without them. None: any arguments.

    Arguments come in the order of the properties; those that are not required may be left out. Values are JSON, which
    the parser reads too, but true and false alone are Python's. Raises ValueError for a schema that says more.
    """
    if schema is None:
        return (
            f'{name}: "(" inside_{name} ")"\ninside_{name}: ({name}_any (", " {name}_any)*)?\n'
            f'{name}_any: /[A-Za-z_][A-Za-z_0-9]*/ "=" {name}_value\n{name}_value: {as_json({})}\n'
        )
    unknown = sorted(set(schema) - _KNOWN)
    properties: Mapping[str, Any] = schema.get("properties", {})
    required = schema.get("required", [])
    if unknown:
        raise ValueError(f"has {unknown[0]}, which this model's format of calls (pythonic) cannot be held to")
    for argument in properties:
        if not argument.isidentifier() or not argument.isascii():
            raise ValueError(f"has the property {argument[:64]!r}, which cannot be the name of a Python argument")
    for argument in required:
        if argument not in properties:
            raise ValueError(f"requires {str(argument)[:64]!r}, which is none of its properties")
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    rules = f'{name}: "(" inside_{name} ")"\ninside_{name}: {name}_0_first\n'
    last = len(properties)
    for index, (argument, value) in enumerate(properties.items()):
        rules += f"{name}_value_{index}: {_value(value, definitions, as_json)}\n"
        for place, comma in (("first", ""), ("then", ", ")):
            given = f'"{comma}{argument}=" {name}_value_{index} {name}_{index + 1}_then'
            left_out = "" if argument in required else f" | {name}_{index + 1}_{place}"
            rules += f"{name}_{index}_{place}: {given}{left_out}\n"
    return rules + f'{name}_{last}_first: ""\n{name}_{last}_then: ""\n'


def _value(schema: Any, definitions: Mapping[str, Any], as_json: Callable[[Mapping[str, Any]], str]) -> str:
    if schema is True:
        schema = {}
    if not isinstance(schema, Mapping):
        raise ValueError("has a property whose schema is no object")
    if schema.get("type") == "boolean" and "enum" not in schema and "const" not in schema:
        return '"True" | "False"'
    return as_json({**definitions, **schema})
