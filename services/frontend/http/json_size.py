"""Refuses a body of very many small values before it is parsed: the parser makes an object of each in one go, and
every stream of the process waits meanwhile. `parsing` asks."""

import asyncio

from services.frontend.http.errors import bad_request

# Of ordinary requests the longest conversations come near a tenth of the first, and 64 prompts of 8,000 token ids make
# nearly all of the second.
MAX_CONTAINERS = 10_000  # objects and lists
MAX_VALUES = 600_000
_PART_BYTES = 512 * 1024  # a millisecond's work
_SMALL_BODY = MAX_CONTAINERS  # bytes: it cannot hold more


async def check_json_size(body: bytes) -> None:
    """Raise ApiError 400 where the body has more values than a request can need."""
    if len(body) <= _SMALL_BODY or not await _may_be_over(body):
        return
    # Text may hold as many braces and commas as it likes. To tell it from JSON takes long.
    if _is_over(*await asyncio.to_thread(count_outside_strings, body)):
        raise bad_request(
            f"the body has more than {MAX_CONTAINERS} JSON objects and lists, or {MAX_VALUES} values: send fewer in "
            "one request"
        )


async def _may_be_over(body: bytes) -> bool:
    """Whether it would be, were all of it JSON's own and no text."""
    containers = commas = 0
    for start in range(0, len(body), _PART_BYTES):
        if start:
            await asyncio.sleep(0)
        more_containers, more_commas = _count(body, start, start + _PART_BYTES)
        containers += more_containers
        commas += more_commas
    return _is_over(containers, commas)


def count_outside_strings(body: bytes) -> tuple[int, int]:
    """Objects and lists, and commas, of JSON; no further than to the first that is over its limit."""
    containers = commas = position = 0
    while not _is_over(containers, commas):
        quote = body.find(b'"', position)
        end = quote if quote >= 0 else len(body)
        more_containers, more_commas = _count(body, position, end)
        containers += more_containers
        commas += more_commas
        if quote < 0:
            break
        position = _end_of_string(body, quote)
    return containers, commas


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


def _count(body: bytes, start: int, end: int) -> tuple[int, int]:
    return body.count(b"{", start, end) + body.count(b"[", start, end), body.count(b",", start, end)


def _is_over(containers: int, commas: int) -> bool:
    return containers > MAX_CONTAINERS or commas >= MAX_VALUES
