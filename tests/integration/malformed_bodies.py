"""Request bodies that are wrong for certain, drawn at random: the server has to refuse every one of them.

What is wrong by value is so by the server's own published schema, so the fuzz holds the schema to the truth too; what
is no JSON at all, or says what JSON cannot, is made from valid text.
"""

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema_rs

from tests.integration.keep_alive_client import JSON, RawRequest

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
    "/v1/completions": {"prompt": "hi", "max_tokens": 3},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [1]},
}
_TEXTS = [
    "",
    "user",
    "text",
    "auto",
    "none",
    "1",
    "true",
    "null",
    "\x00",
    "👩‍👩‍👧",
    "é" * 300,
    "<|im_end|>",
    "../../etc/passwd",
]
_NUMBERS = [0, 1, -1, 3, 2**31, 2**53 + 1, 2**63 - 1, -(2**63), 0.5, -0.0, 1e-320, 1e308, -1e308, 300]
_NO_JSON_NUMBERS = ["NaN", "Infinity", "-Infinity", "+1", "01", "1.", ".5", "0x10", "1_000"]
_BROKEN_ESCAPES = [
    "\\ud800",
    "\\udfff",
    "\\ud83d\\u0041",
    "\\ude00\\ud83d",
    "\\u12",
    "\\x41",
    "\\",
    "\n",
    "\x00",
    "\x1f",
]
_BROKEN_UTF8 = [
    b"\xff",
    b"\xc0\x80",
    b"\xed\xa0\x80",
    b"\xe4\xbd",
    b"\xf5\x80\x80\x80",
    b"\xf8\x88\x80\x80\x80",
    b"\x80",
]


class MalformedBodies:
    """An endless source, the same for the same `seed`. `document` is the server's /openapi.json."""

    def __init__(self, document: dict[str, Any], seed: int) -> None:
        self._random = random.Random(seed)
        self._schemas: dict[str, dict[str, Any]] = {}
        self._is_valid: dict[str, Callable[[Any], bool]] = {}
        schemas = document["components"]["schemas"]
        for path in BODIES:
            reference = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
            self._schemas[path] = schemas[reference["$ref"].rpartition("/")[2]]
            self._is_valid[path] = jsonschema_rs.validator_for(
                {**reference, "components": {"schemas": schemas}}
            ).is_valid

    def __iter__(self) -> Iterator[RawRequest]:
        kinds = [self._wrong_value] * 10 + [
            self._huge_number,
            self._no_json_number,
            self._broken_string,
            self._invalid_utf8,
            self._deeply_nested,
            self._cut_off,
            self._something_after,
            self._no_object,
            self._not_declared_as_json,
            self._random_bytes,
        ]
        while True:
            path = self._random.choice(list(BODIES))
            yield self._random.choice(kinds)(path)

    def _wrong_value(self, path: str) -> RawRequest:
        """One or several fields that the schema refuses, at any depth."""
        while True:
            body = json.loads(json.dumps(BODIES[path]))
            for _ in range(self._random.choice((1, 1, 1, 2, 5))):
                self._spoil(body, self._schemas[path]["properties"])
            if not self._is_valid[path](body):
                return RawRequest(path, json.dumps(body).encode())

    def _spoil(self, node: Any, fields: dict[str, Any]) -> None:
        while isinstance(node, (dict, list)) and node and self._random.random() < 0.5:
            deeper = self._random.choice(list(node.values()) if isinstance(node, dict) else node)
            if not isinstance(deeper, (dict, list)):
                break
            node, fields = deeper, dict.fromkeys(("role", "content", "name", "tool_calls", "type", "text"))
        if isinstance(node, dict):
            if node and self._random.random() < 0.1:
                del node[self._random.choice(list(node))]
            else:
                node[self._random.choice(list(fields))] = self._value()
        else:
            node.insert(self._random.randint(0, len(node)), self._value())

    def _value(self, depth: int = 0) -> Any:
        draw = self._random
        kind = draw.randint(0, 4 if depth == 4 else 6)
        match kind:
            case 0:
                return draw.choice((None, True, False))
            case 1 | 2:
                return draw.choice(_NUMBERS)
            case 3 | 4:
                return draw.choice(_TEXTS)
            case 5:
                return [self._value(depth + 1) for _ in range(draw.randint(0, 4))]
            case _:
                names = ["role", "content", "type", "text", "function", "name", "include_usage", "5", "", "\x00"]
                return {draw.choice(names): self._value(depth + 1) for _ in range(draw.randint(0, 4))}

    def _huge_number(self, path: str) -> RawRequest:
        name = self._random.choice(self._numeric(path))
        digits = self._random.choice((20, 40, 310, 4299, 4300, 4301, 20_000))
        number = self._random.choice(("", "-")) + "9" * digits + self._random.choice(("", ".5", "e9", "e999"))
        return RawRequest(path, self._with(path, name, number))

    def _numeric(self, path: str) -> list[str]:
        """Fields that are numbers, or hold them."""
        known = self._schemas[path]["properties"]
        names = [
            name
            for name, schema in known.items()
            if '"integer"' in json.dumps(schema) or '"number"' in json.dumps(schema)
        ]
        return [name for name in names if name not in ("stop", "prompt")] or ["prompt", "add_special_tokens"]

    def _no_json_number(self, path: str) -> RawRequest:
        name = self._random.choice([*self._schemas[path]["properties"], "unknown_field"])
        return RawRequest(path, self._with(path, name, self._random.choice(_NO_JSON_NUMBERS)))

    def _broken_string(self, path: str) -> RawRequest:
        name = self._random.choice([*self._schemas[path]["properties"], "unknown_field"])
        text = f'"some {self._random.choice(_BROKEN_ESCAPES)} text"'
        return RawRequest(path, self._with(path, name, self._random.choice((text, f"[{text}]", f"{{{text}: 1}}"))))

    def _with(self, path: str, name: str, value: str) -> bytes:
        """The valid body with one more field, whose value is this text."""
        body = {key: kept for key, kept in BODIES[path].items() if key != name}
        return (json.dumps(body)[:-1] + (", " if body else "") + f"{json.dumps(name)}: {value}}}").encode()

    def _invalid_utf8(self, path: str) -> RawRequest:
        body = json.dumps(BODIES[path] | {"user": "abc"}).encode()
        position = body.index(b'abc"') + self._random.randint(0, 3)
        return RawRequest(path, body[:position] + self._random.choice(_BROKEN_UTF8) + body[position:])

    def _deeply_nested(self, path: str) -> RawRequest:
        depth = self._random.choice((200, 1000, 10_000, 100_000))
        opening, closing = self._random.choice((("[", "]"), ('{"a":', "}"), ('[{"content":', "}]")))
        name = self._random.choice([*self._schemas[path]["properties"], "unknown_field"])
        nested = opening * depth + "1" + closing * depth * self._random.randint(0, 1)
        return RawRequest(path, self._with(path, name, nested))

    def _cut_off(self, path: str) -> RawRequest:
        body = json.dumps(BODIES[path]).encode()
        return RawRequest(path, body[: self._random.randint(0, len(body) - 1)])

    def _something_after(self, path: str) -> RawRequest:
        return RawRequest(
            path, json.dumps(BODIES[path]).encode() + self._random.choice((b"}", b"{}", b"x", b"\x00", b","))
        )

    def _no_object(self, path: str) -> RawRequest:
        value = self._random.choice((None, True, 1, 1.5, "text", [], [BODIES[path]]))
        return RawRequest(path, json.dumps(value).encode())

    def _not_declared_as_json(self, path: str) -> RawRequest:
        kind = self._random.choice(("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "", None))
        body = json.dumps(BODIES[path]).encode()
        return RawRequest(path, body, () if kind is None else (("Content-Type", kind),))

    def _random_bytes(self, path: str) -> RawRequest:
        return RawRequest(path, b"\xfe" + self._random.randbytes(self._random.randint(0, 200)), JSON)
