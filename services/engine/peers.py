"""The frontends that said HELLO: when each was last heard and told something, and what it has not taken yet."""

import logging
import time
from collections import deque
from dataclasses import dataclass, field

from services.engine.kv_cache import BlockEvents

# A frontend that stops reading first fills ZMQ's queue, then this, and is then taken for dead.
MAX_BACKLOG_BYTES = 64 * 1024 * 1024
MAX_BACKLOG_MESSAGES = 10_000
MAX_PEERS = 4096


@dataclass(slots=True, eq=False)
class Peer:
    """One frontend process. Times in seconds of the monotonic clock."""

    identity: bytes
    last_heard: float
    last_told: float = 0.0
    block_events: BlockEvents = field(default_factory=BlockEvents)
    backlog: deque[bytes] = field(default_factory=deque)
    backlog_bytes: int = 0

    @property
    def name(self) -> str:
        return self.identity.hex()

    @property
    def backlog_is_full(self) -> bool:
        return self.backlog_bytes > MAX_BACKLOG_BYTES or len(self.backlog) > MAX_BACKLOG_MESSAGES

    def keep(self, data: bytes) -> None:
        """Put a message behind those that the frontend has not taken."""
        self.backlog.append(data)
        self.backlog_bytes += len(data)


class RareLog:
    """A warning that one hostile peer cannot fill the log with: once in a while, with the count in between."""

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
