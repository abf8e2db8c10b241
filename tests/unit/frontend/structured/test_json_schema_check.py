"""What a schema asks for and would not be enforced is found, with its place."""

from typing import Any

import pytest

from services.frontend.structured.json_schema import MAX_DEPTH, MAX_SUBSCHEMAS, SchemaFault, check_schema

TEXT = {"type": "string"}
FAULTS: list[tuple[Any, str]] = [
    ({"uniqueItems": True}, ".uniqueItems"),
    ({"properties": {"a": {"not": TEXT}}}, ".properties.a.not"),
    ({"$defs": {"d": {"if": TEXT}}}, ".$defs.d.if"),
    ({"definitions": {"d": {"propertyNames": TEXT}}}, ".definitions.d.propertyNames"),
    ({"items": {"contains": TEXT}}, ".items.contains"),
    ({"items": [TEXT, {"unevaluatedItems": False}]}, ".items[1].unevaluatedItems"),
    ({"prefixItems": [{"dependentRequired": {}}]}, ".prefixItems[0].dependentRequired"),
    ({"anyOf": [TEXT, {"dependentSchemas": {}}]}, ".anyOf[1].dependentSchemas"),
    ({"allOf": [{"$dynamicRef": "#a"}]}, ".allOf[0].$dynamicRef"),
    ({"oneOf": [{"requried": ["a"]}]}, ".oneOf[0].requried"),
    ({"additionalProperties": {"nullable": True}}, ".additionalProperties.nullable"),
    ({"patternProperties": {"^a": {"minContains": 1}}}, ".patternProperties.^a.minContains"),
    ({"x-guidance": {"lenient": True}}, ".x-guidance"),
    ({"type": "string", "format": "regex"}, ".format"),
    ({"type": ["null", "string"], "format": "iri"}, ".format"),
    ({"properties": {"a": 5}}, ".properties.a"),
    ({"properties": []}, ".properties"),
    ({"anyOf": {}}, ".anyOf"),
    ({"$ref": "https://example.org/schema"}, ".$ref"),
    ({"$ref": 5}, ".$ref"),
    ({"type": "object", "minProperties": 2}, ".minProperties"),
    ([], ""),
    ("string", ""),
]


@pytest.mark.parametrize(("schema", "place"), FAULTS, ids=[place or "." for _, place in FAULTS])
def test_the_place_of_each_fault(schema: Any, place: str) -> None:
    with pytest.raises(SchemaFault) as fault:
        check_schema(schema)
    assert fault.value.place == place
    assert fault.value.message


@pytest.mark.parametrize(
    "schema",
    [
        True,
        {},
        {"title": "t", "description": "d", "default": 1, "examples": [1], "x-mine": {"a": 1}, "$comment": "c"},
        {"type": "integer", "format": "int32"},
        {"type": "object", "minProperties": 1},
        {"type": "object", "minProperties": 2, "required": ["a", "b"]},
        {"properties": {"a": {}, "b": {}}, "minProperties": 2, "additionalProperties": False},
        {"properties": {"uniqueItems": {"type": "string"}, "not": True}},
        {"enum": [{"not": "a keyword here"}], "const": {"if": 1}, "default": {"uniqueItems": True}},
        {"$ref": "#/$defs/a", "$defs": {"a": {"type": "null"}}},
    ],
)
def test_what_is_enforced_passes(schema: Any) -> None:
    check_schema(schema)


def test_bounds() -> None:
    deep: dict[str, Any] = {}
    for _ in range(MAX_DEPTH + 1):
        deep = {"items": deep}
    with pytest.raises(SchemaFault, match="deep"):
        check_schema(deep)
    with pytest.raises(SchemaFault, match="subschemas"):
        check_schema({"anyOf": [{}] * (MAX_SUBSCHEMAS + 1)})
