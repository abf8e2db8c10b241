"""Warnings that one hostile peer cannot fill the log with. `link` and `gatekeeper` use it."""

import logging
import time


class RareLog:
    """A warning once in a while, with the count in between."""

    def __init__(self, logger: logging.Logger, interval: float = 10.0) -> None:
        self._logger = logger
        self._interval = interval
        self._next = 0.0
        self._suppressed = 0

    def warning(self, message: str, *args: object) -> None:
        now = time.monotonic()
        if now < self._next:
            self._suppressed += 1
            return
        if self._suppressed:
            message += f" (and {self._suppressed} more like it since the last such line)"
        self._next = now + self._interval
        self._suppressed = 0
        self._logger.warning(message, *args)
