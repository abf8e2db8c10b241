"""A request's JSON as Python values, without holding up the event loop. `parsing` asks, `json_size` bounds.

A parser makes all values of a text in one go: 64 prompts of 8,000 token ids are half a million. To find where the items
of a large body's lists begin and end takes it a millisecond for each megabyte; then each of them is parsed by itself.
"""

from typing import Any

import msgspec
from pydantic_core import from_json

from services.frontend.http.errors import bad_request
from services.frontend.http.json_size import check_json_size
from services.frontend.http.turns import Turns

# What is no longer than this is parsed at once, in well under a millisecond.
PART_BYTES = 32 * 1024

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_items = msgspec.json.Decoder(list[msgspec.Raw])


class TokenIds(list[int]):
    """A list that is known to hold whole numbers only: to look at each of them again would take long."""


async def read_json(body: bytes, turns: Turns) -> Any:
    """Raises ValueError where it is no JSON, and ApiError 400 where it has more values than a request can need."""
    await check_json_size(body)
    try:
        fields = _fields.decode(body)
    except msgspec.ValidationError:
        raise bad_request("the body must be a JSON object") from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(str(error)) from error
    value: dict[str, Any] = {}
    await turns.next()
    for name, raw in fields.items():
        field = bytes(raw)
        if turns.over or len(field) > PART_BYTES:
            await turns.next()
        try:
            value[name] = await _read_field(field, turns)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{name[:64]}: {error}") from error
    return value


async def _read_field(field: bytes, turns: Turns) -> Any:
    # The items of a list of numbers are too many, and too small, to be found first.
    if len(field) <= PART_BYTES or not field.startswith(b"[") or field[1:].lstrip()[:1] not in (b"[", b"{", b'"'):
        return _parse(field)
    values: list[Any] = []
    for item in _items.decode(field):
        values.append(_parse(bytes(item)))
        if turns.over:
            await turns.next()
    return values


def _parse(text: bytes) -> Any:
    value = from_json(text, allow_inf_nan=False)
    # Types are gathered in C.
    return TokenIds(value) if isinstance(value, list) and value and set(map(type, value)) == {int} else value
