"""Keeps work on the event loop from holding up everything else there."""

import asyncio
import time

TURN_SECONDS = 0.001


class Turns:
    """Long work asks between its parts, each well under a millisecond: `if turns.over: await turns.next()`."""

    def __init__(self) -> None:
        self._ends = time.perf_counter() + TURN_SECONDS

    @property
    def over(self) -> bool:
        return time.perf_counter() >= self._ends

    async def next(self) -> None:
        """Let everything else have its turn."""
        await asyncio.sleep(0)
        self._ends = time.perf_counter() + TURN_SECONDS
