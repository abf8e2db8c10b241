"""How late the event loop is: what everything that it serves waits for, whatever holds it up."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from services.frontend.metrics.catalogue import EVENT_LOOP_LAG

_INTERVAL = 0.02  # seconds


class EventLoopLag:
    """Asks the loop to call it fifty times a second, and counts how much later than asked it does."""

    def __init__(self) -> None:
        self.seconds = EVENT_LOOP_LAG.distribution()
        self._timer: asyncio.TimerHandle | None = None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watches the running loop while the context lasts."""
        loop = asyncio.get_running_loop()

        def look(due: float) -> None:
            now = loop.time()
            self.seconds.observe(max(0.0, now - due))
            self._timer = loop.call_at(now + _INTERVAL, look, now + _INTERVAL)

        due = loop.time() + _INTERVAL
        self._timer = loop.call_at(due, look, due)
        try:
            yield
        finally:
            if self._timer is not None:
                self._timer.cancel()
