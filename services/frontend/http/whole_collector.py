"""The collector of an answer that is not streamed: its reader wakes once, when everything is there."""

import asyncio
from collections.abc import Callable

from services.frontend.output.collector import Collector, Delta


class WholeCollector(Collector):
    """`get` waits until every choice has finished, or one has failed."""

    def __init__(self, num_choices: int) -> None:
        super().__init__(num_choices)
        self._unfinished = set(range(num_choices))
        self._complete = asyncio.Event()

    def put(self, index: int, delta: Delta) -> None:
        super().put(index, delta)
        if delta.finish_reason is not None:
            self._unfinished.discard(index)
        if delta.error is not None or not self._unfinished:
            self._complete.set()

    def take(self, wake: Callable[[], None] | None = None) -> list[tuple[int, Delta]]:
        """One delta for each choice that has any."""
        self._wake = wake
        whole: list[tuple[int, Delta]] = []
        for index, unread in enumerate(self._unread):
            if unread:
                delta = unread.pop()
                while unread:
                    delta = unread.pop().merge(delta)
                whole.append((index, delta))
        return whole

    async def get(self) -> list[tuple[int, Delta]]:
        await self._complete.wait()
        return await super().get()
