"""A request's JSON as Python values, without holding up the event loop. `parsing` asks, `json_size` bounds.

A parser makes all values of a text in one go: 64 prompts of 8,000 token ids are half a million. To find where the items
of a large body's lists and objects begin and end takes it half a millisecond for each megabyte; then each of them is
parsed by itself. Long texts and long lists of numbers are cut at any place that is not within a sign or a number.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from pydantic_core import from_json

from services.frontend.http.errors import bad_request
from services.frontend.http.json_size import check_json_size, count_strings
from services.frontend.http.turns import Turns

# What is no longer than this is parsed at once, in well under a millisecond.
PART_BYTES = 32 * 1024
# Lists and objects within each other are taken apart so far down: a message's text part is the sixth.
_MAX_LEVELS = 6
# Of what is longer and cannot be taken apart. A schema or a logit_bias at its limit has fewer.
MAX_VALUES_AT_ONCE = 20_000

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_items = msgspec.json.Decoder(list[msgspec.Raw])
_HIGH_SURROGATE = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}\Z")


class TokenIds(list[int]):
    """A list that is known to hold whole numbers only: to look at each of them again would take long."""


class WholeNumbers(list[float]):
    """Another as it was sent, with numbers such as 802.0: JSON Schema calls them whole, and some languages write all of
    theirs so. `token_ids` are the same without the points."""

    token_ids: list[int]


def as_token_ids(value: Any) -> list[int] | None:
    """The numbers of a list that holds whole ones only (JSON's true is none); None where it does not."""
    if isinstance(value, TokenIds):
        return value
    if isinstance(value, WholeNumbers):
        return value.token_ids
    # A longer one has been read in parts, and would be one of these.
    if not isinstance(value, list) or len(value) > PART_BYTES:
        return None
    types = set(map(type, value))  # gathered in C
    if types <= {int}:
        return value
    if types <= {int, float} and all(type(number) is int or number.is_integer() for number in value):
        return list(map(int, value))
    return None


async def read_json(body: bytes, turns: Turns, reads: Callable[[str], bool] = lambda name: True) -> Any:
    """`reads` says of which fields the value matters; that of another may come out as True where it is long.

    Raises ValueError where it is no JSON, and ApiError 400 where it has more values than a request can need."""
    await check_json_size(body)
    try:
        fields = _fields.decode(body)
    except msgspec.ValidationError:
        raise bad_request("the body must be a JSON object") from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(str(error)) from error
    if len(fields) > MAX_VALUES_AT_ONCE:
        raise bad_request(f"the body is an object of more than {MAX_VALUES_AT_ONCE} values")
    value: dict[str, Any] = {}
    await turns.next()
    for name, raw in fields.items():
        if turns.over:
            await turns.next()
        if len(raw) > PART_BYTES and not reads(name):
            value[name] = True
            continue
        try:
            value[name] = await _read(bytes(raw), turns, name)
        except (ValueError, RecursionError, msgspec.DecodeError) as error:
            raise ValueError(f"{name[:64]}: {error}") from error
    return value


async def _read(text: bytes, turns: Turns, name: str, level: int = 1) -> Any:
    """A value of the field `name`, so many levels down."""
    if len(text) <= PART_BYTES:
        return _parse(text)
    await turns.next()
    if text.startswith(b'"'):
        pieces: list[str] = []
        for start, end in _text_parts(text):
            pieces.append(from_json(b'"' + text[start:end] + b'"'))
            if turns.over:
                await turns.next()
        return "".join(pieces)
    if text.startswith(b"[") and not any(sign in text for sign in (b'"', b"{")) and text.count(b"[") == 1:
        return await _read_numbers(text, turns)
    has_many_commas = text.count(b",") >= MAX_VALUES_AT_ONCE
    if (
        level < _MAX_LEVELS
        and text.startswith(b"[")
        and (not has_many_commas or text[1:].lstrip()[:1] in (b"[", b"{", b'"'))
    ):
        values: list[Any] = []
        for item in _items.decode(text):
            values.append(
                await _read(bytes(item), turns, name, level + 1) if len(item) > PART_BYTES else _parse(bytes(item))
            )
            if turns.over:
                await turns.next()
        return values
    is_object = text.startswith(b"{")
    if has_many_commas:
        # In an object they may be a text's, or those of a list of numbers.
        num_names = count_strings(text)
        if num_names >= MAX_VALUES_AT_ONCE or not is_object or level == _MAX_LEVELS:
            message = f"has an object, or a list of this and that, of more than {MAX_VALUES_AT_ONCE} values"
            raise bad_request(f"{name[:64]} {message}", name[:64])
    if level == _MAX_LEVELS or not is_object:
        return _parse(text)
    value: dict[str, Any] = {}
    for key, item in _fields.decode(text).items():
        value[key] = await _read(bytes(item), turns, name, level + 1) if len(item) > PART_BYTES else _parse(bytes(item))
        if turns.over:
            await turns.next()
    return value


def _parse(text: bytes) -> Any:
    value = from_json(text, allow_inf_nan=False)
    if not isinstance(value, list) or not value:
        return value
    token_ids = as_token_ids(value)
    if token_ids is None:
        return value
    return TokenIds(value) if token_ids is value else _whole_numbers(value, token_ids)


def _whole_numbers(values: list[Any], token_ids: list[int]) -> WholeNumbers:
    numbers = WholeNumbers(values)
    numbers.token_ids = token_ids
    return numbers


async def _read_numbers(text: bytes, turns: Turns) -> list[Any]:
    """A list that has neither texts nor lists nor objects in it."""
    values = TokenIds()
    token_ids: list[int] | None = values  # until a number comes that is written with a point
    start, last = 1, text.rindex(b"]")
    while start <= last:
        end = text.find(b",", start + PART_BYTES, last)
        part = _parse(b"[" + text[start : end if end >= 0 else last] + b"]")
        if not part and end < 0 and start == 1:
            return part
        if not part:
            raise ValueError("a list ends in a comma")
        if token_ids is values and type(part) is not TokenIds:
            token_ids = list(values)
        values += part
        if token_ids is not values and token_ids is not None:
            part_ids = as_token_ids(part)
            if part_ids is None:
                token_ids = None
            else:
                token_ids += part_ids
        start = end + 1 if end >= 0 else last + 1
        if turns.over:
            await turns.next()
    if token_ids is values:
        return values
    return list(values) if token_ids is None else _whole_numbers(values, token_ids)


def _text_parts(text: bytes) -> Iterator[tuple[int, int]]:
    """Where a JSON string may be cut: neither within an escape, nor between the two of a pair, nor within UTF-8."""
    start, last = 1, len(text) - 1
    while start < last:
        size = PART_BYTES
        end = _cut(text, start, min(start + size, last), last)
        while end <= start:  # all of it is one sign
            size *= 2
            end = _cut(text, start, min(start + size, last), last)
        yield start, end
        start = end


def _cut(text: bytes, start: int, end: int, last: int) -> int:
    """The last place up to `end` at which the text may be cut, which it was at `start`; perhaps `start` itself."""
    if end == last:
        return end
    escape = text.rfind(b"\\", max(start, end - 5), end)
    if escape >= 0 and _is_escape(text, start, escape):
        end = escape
    for _ in range(3):
        end -= text[end] & 0xC0 == 0x80
    before = max(start, end - 6)
    if _HIGH_SURROGATE.match(text[before:end]) and _is_escape(text, start, before):
        end = before
    return end


def _is_escape(text: bytes, start: int, backslash: int) -> bool:
    """Whether it begins an escape, and is not the second of two."""
    before = text[start : backslash + 1]
    return (len(before) - len(before.rstrip(b"\\"))) % 2 == 1
