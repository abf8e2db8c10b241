"""The two hand-overs between the loop's thread and the link's: whole batches, no waiting for the other side."""

import contextlib
import socket
import threading
from collections import deque
from typing import Generic, TypeVar

Item = TypeVar("Item")


# What a decoded message takes at least, however few bytes it had on the wire.
ITEM_BYTES = 512


class Inbox(Generic[Item]):
    """What frontends sent, for the loop. `is_full` tells the writer to stop reading from the network: what it
    leaves there waits in ZMQ's and then in TCP's buffers, so that nothing is lost."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._items: list[Item] = []
        self._bytes = 0
        self._changed = threading.Condition()

    def __len__(self) -> int:
        return len(self._items)

    @property
    def is_full(self) -> bool:
        return self._bytes >= self._max_bytes

    def put(self, item: Item, num_bytes: int) -> None:
        """Never waits, and takes the item even when full: control items must not be lost."""
        with self._changed:
            self._items.append(item)
            self._bytes += num_bytes + ITEM_BYTES
            self._changed.notify()

    def take_all(self, timeout: float) -> list[Item]:
        """Everything there is; waits up to `timeout` seconds for something where there is nothing."""
        if timeout <= 0 and not self._items:
            return []
        with self._changed:
            if not self._items:
                self._changed.wait(timeout)
            items, self._items = self._items, []
            self._bytes = 0
            return items


class Outbox(Generic[Item]):
    """What the loop hands to the link's thread, which waits on `descriptor` beside its sockets."""

    def __init__(self, max_items: int) -> None:
        self._max_items = max_items
        self._items: deque[Item] = deque()
        self._signalled = False
        self._closed = False
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def __len__(self) -> int:
        return len(self._items)

    @property
    def descriptor(self) -> int:
        return self._reader.fileno()

    def put(self, item: Item) -> None:
        """Never waits. Raises OverflowError where the other thread hangs. Does nothing once that has ended: whoever
        watches over it ends this one too."""
        if self._closed:
            return
        if len(self._items) >= self._max_items:
            raise OverflowError(f"the link's thread has left {len(self._items)} steps' outputs lying: it hangs")
        self._items.append(item)
        if not self._signalled:
            self._signalled = True
            with contextlib.suppress(OSError):
                self._writer.send(b"\0")

    def take_all(self) -> list[Item]:
        """Everything there is, without waiting."""
        # In this order, so that an item put from now on signals again.
        with contextlib.suppress(BlockingIOError):
            self._reader.recv(64)
        self._signalled = False
        items: list[Item] = []
        while self._items:
            items.append(self._items.popleft())
        return items

    def close(self) -> None:
        self._closed = True
        self._reader.close()
        self._writer.close()
