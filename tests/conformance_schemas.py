"""A few hundred small JSON Schemas: every keyword that docs/structured-output.md claims, alone and combined.

Small, so that a model that rambles comes to an end: what is looked for is wrong output, not long output.
"""

import itertools
from typing import Any

Schema = dict[str, Any]

SHORT: Schema = {"type": "string", "maxLength": 6}
SMALL: Schema = {"type": "integer", "minimum": -50, "maximum": 50}
FLAG: Schema = {"type": "boolean"}
FORMATS = ("date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid")


def closed(**properties: Schema) -> Schema:
    """An object of exactly these properties."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def all_schemas() -> dict[str, Schema]:
    """By name."""
    families = (types(), numbers(), strings(), arrays(), objects(), choices(), references(), nested())
    return dict(itertools.chain.from_iterable(family.items() for family in families))


def types() -> dict[str, Schema]:
    found: dict[str, Schema] = {f"type {name}": {"type": name} for name in ("boolean", "null", "integer")}
    for first, second in itertools.combinations(("boolean", "null", "integer"), 2):
        found[f"types {first} {second}"] = {"type": [first, second]}
    for value in (
        None,
        True,
        0,
        -7,
        2.5,
        "",
        "a b",
        'quo"te',
        "naïve",
        "北京",
        "\n\t\\",
        [],
        [1, "a"],
        {},
        {"a": {"b": []}},
    ):
        found[f"const {value!r}"] = {"const": value}
        found[f"enum with {value!r}"] = {"enum": [value, "other", 99]}
    found["enum and type"] = {"enum": ["a", 1, None], "type": ["string", "null"]}
    found["const and minimum"] = {"enum": [1, 5, 9], "minimum": 4}
    found["annotated"] = {"title": "T", "description": "d", "default": 5, "examples": [1], "x-own": {}, **SMALL}
    return found


def numbers() -> dict[str, Schema]:
    found: dict[str, Schema] = {}
    for low, high in ((0, 0), (0, 9), (-5, 5), (1, 120), (-1000, -990), (99, 101), (0, 65535), (-1, 1_000_000)):
        found[f"integer {low} to {high}"] = {"type": "integer", "minimum": low, "maximum": high}
        if high - low > 2:
            found[f"integer between {low} and {high}"] = {
                "type": "integer",
                "exclusiveMinimum": low,
                "exclusiveMaximum": high,
            }
    for low, high in ((0, 1), (-0.5, 0.5), (2.25, 2.75), (-100, 100), (0.001, 0.002)):
        found[f"number {low} to {high}"] = {"type": "number", "minimum": low, "maximum": high}
        found[f"number between {low} and {high}"] = {
            "type": "number",
            "exclusiveMinimum": low,
            "exclusiveMaximum": high,
        }
    for factor in (2, 3, 5, 7, 10, 25):
        found[f"multiple of {factor}"] = {"type": "integer", "multipleOf": factor, "minimum": 0, "maximum": 1000}
        found[f"any multiple of {factor}"] = {"type": "integer", "multipleOf": factor}
    for bound in (-3, 0, 17):
        found[f"integer from {bound}"] = {"type": "integer", "minimum": bound}
        found[f"integer over {bound}"] = {"type": "integer", "exclusiveMinimum": bound}
        found[f"integer up to {bound}"] = {"type": "integer", "maximum": bound}
        found[f"integer under {bound}"] = {"type": "integer", "exclusiveMaximum": bound}
    return found


def strings() -> dict[str, Schema]:
    found: dict[str, Schema] = {}
    for least, most in ((0, 0), (0, 1), (1, 1), (2, 4), (5, 5), (3, 9)):
        found[f"string of {least} to {most}"] = {"type": "string", "minLength": least, "maxLength": most}
    patterns = {
        "anchored": "^[a-c]{2,4}$",
        "a part": "ab",
        "a start": "^x",
        "an end": "y$",
        "digits": r"^\d{3}-\d{4}$",
        "alternatives": "^(red|green|dark blue)$",
        "optional": "^colou?r$",
        "classes": r"^[\w.]{1,5}@[a-z]{2,3}$",
        "quotes": r'^"[a-z]"$',
        "backslash": r"^\\[a-z]$",
        "dot": "^a.c$",
        "negated": "^[^a-z]{2}$",
        "unicode": "^[à-ü]{1,3}$",
        "nested": "^((ab|c){1,2}d){1,2}$",
    }
    for name, pattern in patterns.items():
        found[f"pattern {name}"] = {"type": "string", "pattern": pattern, "maxLength": 16}
    found["pattern and length"] = {"type": "string", "pattern": "^[ab]+$", "minLength": 3, "maxLength": 5}
    for name in FORMATS:
        found[f"format {name}"] = {"type": "string", "format": name, **({"maxLength": 60} if name == "uri" else {})}
    return found


def arrays() -> dict[str, Schema]:
    found: dict[str, Schema] = {}
    for name, items in (("flags", FLAG), ("numbers", SMALL), ("strings", SHORT), ("nothing", {"type": "null"})):
        for least, most in ((0, 0), (0, 2), (1, 3), (2, 2)):
            found[f"{least} to {most} {name}"] = {
                "type": "array",
                "items": items,
                "minItems": least,
                "maxItems": most,
            }
    found["a tuple"] = {"type": "array", "prefixItems": [FLAG, SMALL, SHORT], "items": False, "minItems": 3}
    found["a short tuple"] = {"type": "array", "prefixItems": [FLAG, SMALL], "items": False}
    found["a tuple and more"] = {"type": "array", "prefixItems": [FLAG], "items": SMALL, "minItems": 2, "maxItems": 4}
    found["draft 7's tuple"] = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "array",
        "items": [FLAG, SMALL],
        "additionalItems": False,
        "minItems": 2,
    }
    found["arrays in arrays"] = {
        "type": "array",
        "items": {"type": "array", "items": FLAG, "minItems": 1, "maxItems": 2},
        "minItems": 1,
        "maxItems": 2,
    }
    found["no items at all"] = {"type": "array", "items": False}
    return found


def objects() -> dict[str, Schema]:
    found: dict[str, Schema] = {
        "an object of nothing": closed(),
        "one property": closed(a=SMALL),
        "many properties": closed(**{f"p{number}": FLAG for number in range(8)}),
        "names to escape": closed(**{'a"b': FLAG, "c\\d": FLAG, "e f": FLAG, "ü": FLAG}),
    }
    names = ("a", "b", "c")
    for count in range(len(names) + 1):
        for required in itertools.combinations(names, count):
            found[f"required {required}"] = {**closed(a=FLAG, b=SMALL, c=SHORT), "required": list(required)}
    found["required and not described"] = {
        "type": "object",
        "properties": {"a": FLAG},
        "required": ["a", "b"],
        "additionalProperties": SMALL,
        "maxProperties": 3,
    }
    for items in (FLAG, SMALL, SHORT):
        found[f"further {items['type']}"] = {
            "type": "object",
            "properties": {"a": FLAG},
            "required": ["a"],
            "additionalProperties": items,
            "maxProperties": 2,
        }
    found["names of a pattern"] = {
        "type": "object",
        "patternProperties": {"^x[0-9]$": FLAG, "^y": SMALL},
        "additionalProperties": False,
        "maxProperties": 3,
    }
    found["pattern and properties"] = {
        "type": "object",
        "properties": {"a": SHORT},
        "patternProperties": {"^n": SMALL},
        "required": ["a"],
        "additionalProperties": False,
        "maxProperties": 3,
    }
    for least, most in ((0, 1), (1, 1), (1, 2), (0, 3)):
        found[f"{least} to {most} properties"] = {
            "type": "object",
            "additionalProperties": FLAG,
            "minProperties": least,
            "maxProperties": most,
        }
        found[f"a flag and {least} to {most} more"] = {
            "type": "object",
            "properties": {"a": FLAG},
            "required": ["a"],
            "additionalProperties": SMALL,
            "maxProperties": most + 1,
        }
    found["at least those required"] = {**closed(a=FLAG, b=FLAG, c=FLAG), "minProperties": 3}
    found["a property that must not be"] = {
        "type": "object",
        "properties": {"a": FLAG, "b": False},
        "required": ["a"],
        "additionalProperties": False,
    }
    return found


def choices() -> dict[str, Schema]:
    found: dict[str, Schema] = {}
    parts = {"flag": FLAG, "number": SMALL, "string": SHORT, "object": closed(k=FLAG), "nothing": {"type": "null"}}
    for (first, one), (second, other) in itertools.combinations(parts.items(), 2):
        found[f"any of {first} {second}"] = {"anyOf": [one, other]}
        found[f"one of {first} {second}"] = {"oneOf": [one, other]}
    found["a tagged union"] = {
        "oneOf": [closed(kind={"const": "cat"}, lives=SMALL), closed(kind={"const": "dog"}, name=SHORT)],
        "discriminator": {"propertyName": "kind"},
    }
    found["all of two objects"] = {
        "allOf": [
            {"type": "object", "properties": {"a": FLAG}, "required": ["a"]},
            {"type": "object", "properties": {"b": SMALL}, "required": ["b"]},
        ],
        "maxProperties": 2,
    }
    found["all of two ranges"] = {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 8}]}
    found["all of lengths"] = {"allOf": [{"type": "string", "minLength": 2}, {"maxLength": 4}]}
    found["all of patterns"] = {
        "allOf": [{"type": "string", "pattern": "^[a-f]+$"}, {"pattern": "^.{2,4}$"}],
        "maxLength": 4,
    }
    found["any beside type"] = {"type": "integer", "anyOf": [{"minimum": 90}, {"maximum": -90}], "maximum": 200}
    found["optional by null"] = closed(a={"anyOf": [SHORT, {"type": "null"}]})
    return found


def references() -> dict[str, Schema]:
    tree = {
        "type": "object",
        "properties": {"v": FLAG, "c": {"type": "array", "items": {"$ref": "#"}, "maxItems": 1}},
        "required": ["v"],
        "additionalProperties": False,
    }
    link = {**closed(v=SMALL, next={"anyOf": [{"$ref": "#/$defs/link"}, {"type": "null"}]})}
    return {
        "a definition": {"$ref": "#/$defs/a", "$defs": {"a": SMALL}},
        "an older definition": {"$ref": "#/definitions/a", "definitions": {"a": SHORT}},
        "a definition twice": {**closed(a={"$ref": "#/$defs/n"}, b={"$ref": "#/$defs/n"}), "$defs": {"n": SMALL}},
        "by way of another": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": FLAG}},
        "beside others": {"$ref": "#/$defs/a", "maximum": 10, "$defs": {"a": {"type": "integer", "minimum": 5}}},
        "into properties": {**closed(a=FLAG, b={"$ref": "#/properties/a"})},
        "a name to escape": {"$ref": "#/$defs/a~1b", "$defs": {"a/b": FLAG}},
        "a tree": tree,
        "a linked list": {"$ref": "#/$defs/link", "$defs": {"link": link}},
    }


def nested() -> dict[str, Schema]:
    person = closed(name=SHORT, age={"type": "integer", "minimum": 0, "maximum": 120}, email={"enum": ["a@b.c", None]})
    found: dict[str, Schema] = {
        "a person": person,
        "two people": {"type": "array", "items": person, "minItems": 2, "maxItems": 2},
        "a person in a house": closed(street=SHORT, owner=person),
    }
    for depth in (3, 6, 10):
        schema: Schema = FLAG
        for level in range(depth):
            schema = closed(**{f"l{level}": schema})
        found[f"{depth} levels"] = schema
    leaves = {"flag": FLAG, "number": SMALL, "short": SHORT, "choice": {"enum": ["x", 1]}}
    for (first, one), (second, other) in itertools.product(leaves.items(), repeat=2):
        found[f"{first} beside list of {second}"] = closed(
            a=one, b={"type": "array", "items": other, "minItems": 1, "maxItems": 2}
        )
    return found
