"""JSON as bytes that are always valid UTF-8, whatever text a model made."""

import json
from typing import Any

import msgspec

_encoder = msgspec.json.Encoder()


def json_bytes(value: Any) -> bytes:
    """`value` as JSON. A lone surrogate, which UTF-8 cannot carry, becomes a question mark."""
    try:
        return _encoder.encode(value)
    except UnicodeEncodeError:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace")
