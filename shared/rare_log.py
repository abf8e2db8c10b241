"""Log lines that one hostile peer cannot fill the log with. Both sides of the link use it."""

import logging
import time


class RareLog:
    """A line once in a while, with the count in between."""

    def __init__(self, logger: logging.Logger, level: int = logging.WARNING, interval: float = 10.0) -> None:
        self._logger = logger
        self._level = level
        self._interval = interval
        self._next = 0.0
        self._suppressed = 0

    def log(self, message: str, *args: object) -> None:
        now = time.monotonic()
        if now < self._next:
            self._suppressed += 1
            return
        if self._suppressed:
            message += f" (and {self._suppressed} more like it since the last such line)"
        self._next = now + self._interval
        self._suppressed = 0
        self._logger.log(self._level, message, *args)
