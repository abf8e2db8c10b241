"""Refuses a body of very many small values before it is parsed: the parser makes an object of each in one go, and
every stream of the process waits meanwhile. `json_body` asks."""

import asyncio
from dataclasses import dataclass

from services.frontend.http.errors import bad_request

# Of ordinary requests the longest conversations come near a tenth of the first, and 64 prompts of 8,000 token ids make
# nearly all of the second.
MAX_CONTAINERS = 10_000  # objects and lists
MAX_STRINGS = 100_000  # names of fields among them
MAX_VALUES = 600_000
_PART_BYTES = 512 * 1024  # a millisecond's work


async def check_json_size(body: bytes) -> None:
    """Raise ApiError 400 where the body has more values than a request can need."""
    # Text may hold as many braces and commas as it likes. To tell it from JSON takes long.
    if await _may_be_over(body) and (await asyncio.to_thread(count_json, body)).is_over:
        raise bad_request(
            f"the body has more than {MAX_CONTAINERS} JSON objects and lists, {MAX_STRINGS} strings or {MAX_VALUES} "
            "values: send fewer in one request"
        )


@dataclass(slots=True)
class JsonSize:
    """How much of it there is outside strings."""

    containers: int = 0
    strings: int = 0
    commas: int = 0

    @property
    def is_over(self) -> bool:
        return self.containers > MAX_CONTAINERS or self.strings > MAX_STRINGS or self.commas >= MAX_VALUES

    def add(self, body: bytes, start: int, end: int) -> None:
        """Count what is between them, which is taken for no text."""
        self.containers += body.count(b"{", start, end) + body.count(b"[", start, end)
        self.commas += body.count(b",", start, end)


def count_strings(text: bytes, start: int = 0, end: int | None = None) -> int:
    """About how many strings there are: a quote behind two backslashes ends one that ends in a backslash."""
    escaped = text.count(b'\\"', start, end) - text.count(b'\\\\"', start, end)
    return (text.count(b'"', start, end) - escaped) // 2


async def _may_be_over(body: bytes) -> bool:
    """Whether it would be, were all of it JSON's own and no text."""
    size = JsonSize()
    for start in range(0, len(body), _PART_BYTES):
        if start:
            await asyncio.sleep(0)
        end = start + _PART_BYTES
        size.add(body, start, end)
        size.strings += count_strings(body, start, end)
    return size.is_over


def count_json(body: bytes) -> JsonSize:
    """No further than to where it is over a limit."""
    size = JsonSize()
    position = 0
    while not size.is_over:
        quote = body.find(b'"', position)
        size.add(body, position, quote if quote >= 0 else len(body))
        if quote < 0:
            break
        size.strings += 1
        position = _end_of_string(body, quote)
    return size


def _end_of_string(body: bytes, quote: int) -> int:
    end = quote
    while True:
        end = body.find(b'"', end + 1)
        if end < 0:
            return len(body)
        backslashes = 0
        while body[end - 1 - backslashes] == 0x5C:
            backslashes += 1
        if backslashes % 2 == 0:
            return end + 1
