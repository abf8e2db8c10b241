"""A request's JSON as Python values, without holding up the event loop. `parsing` asks.

A parser reads a whole text in one go. What takes long in a large body, lists of token ids and long strings, is read
part by part beforehand; stand-ins of the same length take their places in what the parser gets, so that it tells what
is wrong in the words, and at the place, that it would without. A body of very many other values is refused.
"""

import gc
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pydantic_core import from_json

from services.frontend.http.errors import ApiError, bad_request
from services.frontend.http.turns import Turns

# Of ordinary requests the longest conversations come near a tenth of the first, and 64 prompts of 8,000 token ids make
# nearly all of the second.
MAX_CONTAINERS = 10_000  # objects and lists
MAX_TOKEN_IDS = 600_000
MAX_VALUES = 25_000  # others
MAX_OTHER_BYTES = 2 * 1024 * 1024  # besides strings and token ids; a parser takes 3 ms for so many blanks

# Bodies up to these are read at once, in about a millisecond.
FEW_BYTES, FEW_CONTAINERS, FEW_VALUES = 256 * 1024, 1_000, 10_000

# A part of either takes some 0.2 ms.
PART_BYTES = 32 * 1024
PART_IDS = 4096
# What is shorter stays where it is.
LEAST_BYTES = 512
_NAME_LENGTH = 24  # of a stand-in; the rest of it is filled up

# Whole numbers, each with its comma and before another: whatever is wrong with a list, it is not in there.
_NUMBERS = re.compile(
    rb"(?:[ \t\r\n]{0,64}+-?(?:0|[1-9][0-9]{0,17}+)[ \t\r\n]{0,64}+,(?=[ \t\r\n]{0,64}+[-0-9])){1,%d}+" % PART_IDS
)
# Of a string. No escape is cut, and no pair of them that stands for one character.
_CHARACTERS = re.compile(
    rb'(?:[^"\\]++|\\[^u]|\\u(?:(?![dD][89abAB])[0-9a-fA-F]{4}|[dD][89abAB][0-9a-fA-F]{2}\\u[0-9a-fA-F]{4}))*+'
)


class TokenIds(list[int]):
    """A list that is known to hold whole numbers only: to look at each of them again would take long."""


async def read_json(body: bytes, turns: Turns) -> Any:
    """Raises ValueError where it is no JSON, and ApiError 400 where it has more values than a request can need."""
    if len(body) <= FEW_BYTES and (
        body.count(b"{") + body.count(b"[") <= FEW_CONTAINERS and body.count(b",") <= FEW_VALUES
    ):
        return _parse(body)
    await turns.next()
    hollow = _HollowBody(body, turns)
    await turns.next()
    try:
        await hollow.make()
        await turns.next()
        value = _parse(hollow.text)
    except (ValueError, ApiError):
        await hollow.discard()
        raise
    await turns.next()
    if hollow.is_broken:  # the parser takes what it was thought to refuse
        return _parse(body)
    return await hollow.fill(value)


class _HollowBody:
    """`text` is the body with stand-ins; `is_broken` says that it has a string that no parser should take."""

    def __init__(self, body: bytes, turns: Turns) -> None:
        self.text = bytearray(body)
        self.is_broken = False
        self._body = body
        self._turns = turns
        self._prefix = secrets.token_hex(8)  # no client can guess it
        self._values: dict[str, str | list[int]] = {}  # by the first characters of their stand-ins
        self._containers = self._commas = self._other_bytes = self._token_ids = 0

    async def make(self) -> None:
        """Put the stand-ins into `text`. Raises ApiError 400."""
        body, turns = self._body, self._turns
        position = 0
        while position < len(body):
            quote = body.find(b'"', position)
            await self._read_between(position, quote if quote >= 0 else len(body))
            if quote < 0:
                return
            position = await self._read_string(quote)
            if turns.over:
                await turns.next()

    async def _read_between(self, start: int, end: int) -> None:
        """Of everything that is no string, lists of numbers have stand-ins, and the rest is counted."""
        body, turns = self._body, self._turns
        while start < end:
            part_end = min(end, start + PART_BYTES)
            bracket = body.find(b"[", start, part_end)
            stop = bracket + 1 if bracket >= 0 else part_end
            self._containers += (bracket >= 0) + body.count(b"{", start, stop)
            self._commas += body.count(b",", start, stop)
            self._other_bytes += stop - start
            if self._containers > MAX_CONTAINERS or self._commas >= MAX_VALUES or self._other_bytes > MAX_OTHER_BYTES:
                raise _too_much()
            start = await self._read_numbers(stop) if bracket >= 0 else stop
            if turns.over:
                await turns.next()

    async def _read_numbers(self, start: int) -> int:
        """Where those end that have stand-ins: never the last of a list."""
        while True:
            numbers = _NUMBERS.match(self._body, start)
            if numbers is None or numbers.end() - start <= LEAST_BYTES:
                return start
            comma = numbers.end() - 1
            digits = self._body[start:comma]
            # Line breaks follow the stand-in, the last where it was: a parser counts them.
            line_breaks = digits.count(b"\n")
            blanks = len(digits) - 1 - digits.rfind(b"\n") if line_breaks else 0
            filling = len(digits) - line_breaks - blanks - _NAME_LENGTH - len('""')
            if filling < 0:
                return start
            token_ids = _parse(b"[%b]" % digits)
            self._token_ids += len(token_ids)
            if self._token_ids > MAX_TOKEN_IDS:
                raise _too_much()
            name = self._new_name(token_ids)
            self.text[start:comma] = b'"%b%b"%b%b' % (name, b"x" * filling, b"\n" * line_breaks, b" " * blanks)
            start = comma + 1
            if self._turns.over:
                await self._turns.next()

    async def _read_string(self, quote: int) -> int:
        """Where it ends. It has a stand-in where it is longer than a part."""
        body = self._body
        start = quote + 1
        end = _end_of_characters(body, start)
        if body.startswith(b'"', end):
            return end + 1
        parts: list[str] = []
        while end > start:
            try:
                parts.append(_parse(b'"%b"' % body[start:end]))
            except ValueError:
                break
            self.text[start:end] = b"x" * (end - start)
            if body.startswith(b'"', end):
                self.text[quote + 1 : quote + 1 + _NAME_LENGTH] = self._new_name("".join(parts))
                return end + 1
            start, end = end, _end_of_characters(body, end)
            if self._turns.over:
                await self._turns.next()
        # The parser finds it too, and reads no further.
        self.is_broken = True
        return len(body)

    async def discard(self) -> None:
        """Let go of what was read, part by part: to free half a million numbers takes some milliseconds."""
        while self._values:
            self._values.popitem()
            if self._turns.over:
                await self._turns.next()

    def _new_name(self, value: str | list[int]) -> bytes:
        name = f"{self._prefix}{len(self._values):08x}"
        self._values[name] = value
        return name.encode()

    async def fill(self, value: Any) -> Any:
        """The value that was parsed from `text`, with what the stand-ins stand for."""
        if not self._values:
            return value
        whole = [value]
        unfilled: list[Any] = [whole]
        while unfilled:
            container = unfilled.pop()
            if isinstance(container, dict):
                fields = {self._filled(key): self._filled(each) for key, each in container.items()}
                container.clear()
                container.update(fields)
                unfilled.extend(each for each in fields.values() if isinstance(each, (dict, list)))
            elif not isinstance(container, TokenIds):
                for start in range(0, len(container), PART_IDS):
                    items = list(map(self._filled, container[start : start + PART_IDS]))
                    container[start : start + PART_IDS] = items
                    unfilled.extend(each for each in items if isinstance(each, (dict, list)))
                    if self._turns.over:
                        await self._turns.next()
            if self._turns.over:
                await self._turns.next()
        return whole[0]

    def _filled(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._stands_for(value, value)
        if isinstance(value, list) and value and isinstance(self._stands_for(value[0], None), list):
            return self._filled_numbers(value)
        return value

    def _stands_for(self, text: Any, otherwise: Any) -> Any:
        if isinstance(text, str) and text.startswith(self._prefix):
            return self._values[text[:_NAME_LENGTH]]
        return otherwise

    def _filled_numbers(self, items: list[Any]) -> list[Any]:
        """Stand-ins of numbers are the first items of a list."""
        numbers = TokenIds()
        for index, item in enumerate(items):
            stood_for = self._stands_for(item, None)
            if not isinstance(stood_for, list):
                rest = items[index:]
                break
            numbers.extend(stood_for)
        else:
            rest = []
        if set(map(type, rest)) <= {int}:
            numbers.extend(rest)
            return numbers
        return [*numbers, *rest]


def _end_of_characters(body: bytes, start: int) -> int:
    """Where the whole characters of a string end that begin here: at most a part of it."""
    found = _CHARACTERS.match(body, start, start + PART_BYTES)
    assert found is not None
    end = found.end()
    if end == start + PART_BYTES:
        # Of UTF-8, no character's first byte is like its others.
        for back in range(4):
            if body[end - back : end - back + 1] < b"\x80" or body[end - back] >= 0xC0:
                return end - back
    return end


def _too_much() -> ApiError:
    return bad_request(
        f"the body has more than {MAX_CONTAINERS} JSON objects and lists, {MAX_TOKEN_IDS} token ids or {MAX_VALUES} "
        f"other values, or {MAX_OTHER_BYTES} bytes besides strings and token ids: send less in one request"
    )


def _parse(body: bytes | bytearray) -> Any:
    with collections_paused():
        return from_json(body, allow_inf_nan=False)


@contextmanager
def collections_paused() -> Iterator[None]:
    """Thousands of new objects would have the garbage collector look through all of them again and again: it takes
    most of the time that a large body does."""
    pausing = gc.isenabled()
    if pausing:
        gc.disable()
    try:
        yield
    finally:
        if pausing:
            gc.enable()
