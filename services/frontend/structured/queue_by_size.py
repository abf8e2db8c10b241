"""Whose turn it is where few grammars are compiled at a time: small ones pass large ones, and none waits for ever.

`compile_lane` gives each of its processes' turns this way.
"""

import asyncio
import itertools
from bisect import insort
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from shared.grammar_turns import turn_of

MAX_WAITING = 64

_Place = tuple[float, int, "asyncio.Future[None]"]


class TooManyWait(Exception):
    """There is no room to wait, or a smaller one has taken it."""


class QueueBySize:
    """Belongs to one event loop."""

    def __init__(self, at_once: int) -> None:
        self._free = at_once
        self._numbers = itertools.count()
        self._waiting: list[_Place] = []  # in their order

    @asynccontextmanager
    async def turn(self, characters: int) -> AsyncGenerator[None]:
        """Wait for a turn, and have it. Raises TooManyWait."""
        if self._free:
            self._free -= 1
        else:
            await self._wait(characters)
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, characters: int) -> None:
        loop = asyncio.get_running_loop()
        given: asyncio.Future[None] = loop.create_future()
        place = (turn_of(loop.time(), characters), next(self._numbers), given)
        insort(self._waiting, place)
        if len(self._waiting) > MAX_WAITING and not (last := self._waiting.pop()[2]).done():
            last.set_exception(TooManyWait)
        try:
            await given
        except asyncio.CancelledError:
            if place in self._waiting:
                self._waiting.remove(place)
            elif not given.cancelled() and given.exception() is None:
                self._pass_on()  # it had just been given
            raise

    def _pass_on(self) -> None:
        while self._waiting:
            given = self._waiting.pop(0)[2]
            if not given.done():  # else its client has just left
                given.set_result(None)
                return
        self._free += 1
