"""The loop of `tandem top`: look, draw, wait. Ctrl-C ends it."""

import asyncio
import sys
from collections import deque
from contextlib import nullcontext

from rich.console import Console
from rich.live import Live

from services.top.figures import Figures, figures
from services.top.reading import Frontends, Reading
from services.top.screen import picture
from services.top.settings import TopSettings

_KEPT_RATES = 40  # looks, for the sparkline


def run(settings: TopSettings) -> int:
    """Show until Ctrl-C (0). With `once`, or where the output is no terminal: one picture, and 1 if nobody answered."""
    console = Console()
    try:
        return asyncio.run(_watch(settings, console, once=settings.once or not sys.stdout.isatty()))
    except KeyboardInterrupt:
        return 0


async def _watch(settings: TopSettings, console: Console, *, once: bool) -> int:
    frontends = Frontends(settings.url, settings.api_key)
    history = History(settings.window)
    try:
        with nullcontext() if once else Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                reading = await frontends.read()
                history.add(reading)
                if live is not None:
                    live.update(picture(reading, history.figures(), history.tokens_per_second), refresh=True)
                elif not reading.num_answered or len(history.readings) > 1:
                    console.print(picture(reading, history.figures(), history.tokens_per_second))
                    return 0 if reading.num_answered else 1
                await asyncio.sleep(settings.interval)
    finally:
        await frontends.close()


class History:
    """The looks of the last `window` seconds, and one that is older."""

    def __init__(self, window: float) -> None:
        self.readings: deque[Reading] = deque()
        self.tokens_per_second: list[float] = []
        self._window = window

    def add(self, reading: Reading) -> None:
        if self.readings and self.readings[-1].num_answered != reading.num_answered:
            self.readings.clear()  # sums over other frontends cannot be compared
        self.readings.append(reading)
        while len(self.readings) > 2 and reading.at - self.readings[1].at >= self._window:
            self.readings.popleft()
        rate = sum(engine.tokens_per_second for engine in reading.engines)
        self.tokens_per_second = [*self.tokens_per_second, rate][-_KEPT_RATES:]

    def figures(self) -> Figures | None:
        """Of the whole window; None at the first look."""
        return figures(self.readings[0], self.readings[-1]) if len(self.readings) > 1 else None
