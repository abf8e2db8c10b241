"""New requests take turns: of many that come at once a few are begun in each turn of the event loop, so that streams
are written in between. The routes ask."""

import asyncio
from collections import deque

# Short prompts, about a millisecond's work; what is long is tokenized beside the loop.
PER_TURN = 4


class Arrivals:
    """Of one event loop. Who waits is bounded by whoever asks."""

    def __init__(self) -> None:
        self._left = PER_TURN
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._next_is_due = False

    async def take_turn(self) -> None:
        """Wait for a turn, in the order of asking; not at all where few ask."""
        loop = asyncio.get_running_loop()
        if not self._next_is_due:
            self._next_is_due = True
            loop.call_soon(self._next)
        if self._left and not self._waiting:
            self._left -= 1
            return
        turn = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _next(self) -> None:
        self._left = PER_TURN
        while self._waiting and self._left:
            turn = self._waiting.popleft()
            if not turn.done():  # its client may have left
                turn.set_result(None)
                self._left -= 1
        self._next_is_due = self._left < PER_TURN
        if self._next_is_due:
            asyncio.get_running_loop().call_soon(self._next)
