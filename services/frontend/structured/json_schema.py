"""Finds what a JSON Schema asks for that would not be enforced, with its place: such a schema is refused.

llguidance refuses most keywords that it does not know, but not all, and never says where. What it cannot compile
for other reasons is found by compiling (compile_process.py).
"""

from collections.abc import Iterator
from typing import Any, cast

MAX_DEPTH = 64
MAX_SUBSCHEMAS = 10_000

# As https://json-schema.org/draft/2020-12 has them, and what earlier drafts called them.
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("prefixItems", "anyOf", "allOf", "oneOf")
_SINGLE = ("additionalProperties", "items", "additionalItems")
_ASSERTIONS = (
    *("type", "enum", "const", "format", "pattern", "minLength", "maxLength", "required", "minItems", "maxItems"),
    *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minProperties", "maxProperties"),
    "$ref",
)
_ANNOTATIONS = (
    *("title", "description", "default", "example", "examples", "deprecated", "readOnly", "writeOnly", "$comment"),
    # Of a tagged union, OpenAPI's hint where to look; the oneOf beside it is what holds.
    *("$schema", "$id", "id", "$anchor", "discriminator", "contentEncoding", "contentMediaType"),
)
_KNOWN = frozenset((*_MAPS, *_LISTS, *_SINGLE, *_ASSERTIONS, *_ANNOTATIONS))
_INSTEAD = {
    "nullable": 'OpenAPI\'s; give the type as ["string", "null"]',
    "not": "not supported",
    "if": "not supported; anyOf may say it",
    "uniqueItems": "not supported",
}
_FORMATS = frozenset(
    ("date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid", "unknown")
)


class SchemaFault(ValueError):
    """`place` is a path from the schema's root, such as .properties.age.minimum."""

    def __init__(self, place: str, message: str) -> None:
        super().__init__(message)
        self.place = place
        self.message = message


def check_schema(schema: object) -> None:
    """Raise SchemaFault for the first thing that would not be enforced, or that is too much."""
    for count, (place, depth, subschema) in enumerate(subschemas(schema), 1):
        if depth > MAX_DEPTH:
            raise SchemaFault(place[:200], f"is nested more than {MAX_DEPTH} schemas deep")
        if count > MAX_SUBSCHEMAS:
            raise SchemaFault("", f"has more than {MAX_SUBSCHEMAS} subschemas")
        _check(place, subschema)


def subschemas(schema: object) -> Iterator[tuple[str, int, object]]:
    """Each schema in this one, itself first: its place, how deep it is, and what stands there."""
    stack: list[tuple[str, int, object]] = [("", 0, schema)]
    while stack:
        place, depth, current = stack.pop()
        yield place, depth, current
        if not isinstance(current, dict):
            continue
        content = cast("dict[str, Any]", current)
        inner: list[tuple[str, int, object]] = []
        for keyword in _MAPS:
            if isinstance(mapping := content.get(keyword), dict):
                inner += [(f"{place}.{keyword}.{name}", depth + 1, sub) for name, sub in mapping.items()]
        for keyword in (*_LISTS, "items"):
            if isinstance(listed := content.get(keyword), list):
                inner += [(f"{place}.{keyword}[{index}]", depth + 1, sub) for index, sub in enumerate(listed)]
        for keyword in _SINGLE:
            if keyword in content and not isinstance(content[keyword], list):
                inner.append((f"{place}.{keyword}", depth + 1, content[keyword]))
        stack += reversed(inner)


def _check(place: str, schema: object) -> None:
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise SchemaFault(place, "a schema must be an object or a boolean")
    content = cast("dict[str, Any]", schema)
    for keyword in content:
        if keyword not in _KNOWN and not (keyword.startswith("x-") and keyword != "x-guidance"):
            reason = _INSTEAD.get(keyword, "not a keyword that this server enforces (names of your own begin with x-)")
            raise SchemaFault(f"{place}.{keyword[:100]}", f"is {reason}")
    for keyword in _MAPS:
        if not isinstance(content.get(keyword, {}), dict):
            raise SchemaFault(f"{place}.{keyword}", "must be an object")
    for keyword in _LISTS:
        if not isinstance(content.get(keyword, []), list):
            raise SchemaFault(f"{place}.{keyword}", "must be a list")
    reference = content.get("$ref", "#")
    if not isinstance(reference, str) or not reference.startswith("#"):
        raise SchemaFault(f"{place}.$ref", "must point into this schema (#/$defs/…): nothing is fetched")
    _check_format(place, content)
    _check_number_of_properties(place, content)


def _check_format(place: str, content: dict[str, Any]) -> None:
    types = content.get("type", "string")
    may_be_text = types == "string" or (isinstance(types, list) and "string" in types)
    if "format" in content and may_be_text and content["format"] not in _FORMATS:
        known = ", ".join(sorted(_FORMATS - {"unknown"}))
        raise SchemaFault(f"{place}.format", f"must be one of {known}: other formats are not enforced")


def _check_number_of_properties(place: str, content: dict[str, Any]) -> None:
    least = content.get("minProperties", 0)
    if not isinstance(least, int) or least <= 1:
        return
    # Names that no property fixes may be written twice, and the second takes the first one's place.
    closed = content.get("additionalProperties") is False and not content.get("patternProperties")
    required = content.get("required")
    fixed = len(set(map(str, required))) if isinstance(required, list) else 0
    if not closed and least > fixed:
        raise SchemaFault(
            f"{place}.minProperties",
            "over 1 needs additionalProperties false (or that many required properties): a name of the model's own "
            "choice may come twice",
        )
