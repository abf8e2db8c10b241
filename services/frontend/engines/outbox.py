"""What goes to one engine: whether its link takes it, and which requests it must still be told to stop.

`connection` sends everything through it.
"""

import math
from collections.abc import Callable, Iterable

from shared.protocol import MAX_REQUESTS_PER_MESSAGE, Abort, ToEngine, encode


class Outbox:
    """`send` gives bytes to the link: False where it takes none now. `blocked_changed` is called after that changed.
    Times are of `clock`, in seconds."""

    def __init__(
        self, send: Callable[[bytes], bool], clock: Callable[[], float], blocked_changed: Callable[[], None]
    ) -> None:
        self.blocked_since: float | None = None  # the link has taken no message since
        self.last_sent = -math.inf
        self._send = send
        self._clock = clock
        self._blocked_changed = blocked_changed
        # Wire ids that this engine, should it live, must still be told to stop. Bounded by what it had.
        self._owed_aborts: set[int] = set()

    def send(self, message: ToEngine) -> bool:
        """Send it now. False: the link takes nothing, and the message is not kept."""
        now = self._clock()
        if self._send(encode(message)):
            self.last_sent = now
            if self.blocked_since is not None:
                self.blocked_since = None
                self._blocked_changed()
            return True
        if self.blocked_since is None:
            self.blocked_since = now
            self._blocked_changed()
        return False

    def owe_aborts(self, wire_ids: Iterable[int]) -> None:
        """The engine must be told to stop these: `send_aborts` does."""
        self._owed_aborts.update(wire_ids)

    def send_aborts(self) -> None:
        """Send those that are owed, as far as the link takes them."""
        while self._owed_aborts:
            ids = list(self._owed_aborts)[:MAX_REQUESTS_PER_MESSAGE]
            if not self.send(Abort(ids)):
                return
            self._owed_aborts.difference_update(ids)

    def forget_aborts(self) -> None:
        """The engine has nothing of this process any more."""
        self._owed_aborts.clear()
