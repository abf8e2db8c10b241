"""What a connection needs of whatever carries its bytes to an engine and back.

Two things do: `zmq_link` over TCP, and `in_process`, its twin for tests. `connection` listens to either.
"""

from typing import Protocol


class LinkListener(Protocol):
    """Called on the event loop, never from inside a method of the link. Raises nothing."""

    def link_up(self) -> None:
        """A peer is there: what is sent from now on reaches it, and nothing sent earlier does."""
        ...

    def link_down(self, reason: str) -> None:
        """The peer is gone, or cannot be reached. The link goes on trying; `link_up` tells."""
        ...

    def link_failed(self, reason: str) -> None:
        """A peer is there, and nothing came of it: a wrong key, or what speaks another language. Tried again."""
        ...

    def link_received(self, data: bytes) -> None:
        """One message, in the order in which the peer sent it."""
        ...


class Link(Protocol):
    """One engine's address, sought again and again until `close`."""

    def send(self, data: bytes) -> bool:
        """Hand one message over without waiting. False: the peer takes nothing now, and nothing was sent."""
        ...

    def reset(self) -> None:
        """Drop the peer and what is queued for it, and start over; `link_up` tells when a peer is there."""
        ...

    def close(self) -> None:
        """Stop for good. What was already sent may still reach the peer."""
        ...


class Transport(Protocol):
    """Makes links, and owns what they share."""

    def open(self, address: str, identity: bytes, listener: LinkListener) -> Link:
        """A link to `address` (host:port), under the name by which the engine knows this process."""
        ...

    async def close(self) -> None:
        """Free what the links shared, once they are closed and have sent (for a moment at most) what they had."""
        ...
