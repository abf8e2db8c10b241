"""The frontends that said HELLO: when each was last heard and told something, and what it has not taken yet.

`link` asks and is told here; `router_socket` carries the bytes.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from services.engine.kv_cache import BlockEvents
from services.engine.router_socket import RouterSocket

logger = logging.getLogger(__name__)

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


class Peers:
    """All of them. Every method belongs to the link's thread; counts, `len` and `backlog` are anybody's to read.
    `on_left` is called for each that is gone, whether it said so or not."""

    def __init__(self, router: RouterSocket, on_left: Callable[[Peer], None]) -> None:
        self.num_reconnects = 0
        self.num_lost = 0
        self._router = router
        self._on_left = on_left
        self._by_identity: dict[bytes, Peer] = {}
        self._behind: set[Peer] = set()  # those with a backlog

    def __len__(self) -> int:
        return len(self._by_identity)

    def __iter__(self) -> Iterator[Peer]:
        """Those there are now; they may leave meanwhile."""
        return iter(list(self._by_identity.values()))

    @property
    def backlog(self) -> tuple[int, int]:
        """Messages, and their bytes, that wait for those which do not read."""
        behind = tuple(self._behind)
        return sum(len(peer.backlog) for peer in behind), sum(peer.backlog_bytes for peer in behind)

    @property
    def any_behind(self) -> bool:
        return bool(self._behind)

    def get(self, identity: bytes) -> Peer | None:
        return self._by_identity.get(identity)

    def join(self, identity: bytes, now: float) -> Peer:
        """One that said HELLO; what an earlier self of it was still to be sent is dropped."""
        known = self._by_identity.pop(identity, None)
        if known is not None:
            self.num_reconnects += 1
            self._behind.discard(known)
        peer = self._by_identity[identity] = Peer(identity, last_heard=now)
        logger.info("Frontend %s is connected%s", peer.name, " again" if known is not None else "")
        return peer

    def leave(self, peer: Peer) -> None:
        """Forget it."""
        self._behind.discard(peer)
        peer.backlog.clear()
        del self._by_identity[peer.identity]
        self._on_left(peer)

    def lose(self, peer: Peer, reason: str) -> None:
        """Forget one that did not say that it leaves."""
        if self._by_identity.get(peer.identity) is peer:
            self.num_lost += 1
            logger.warning("Frontend %s is taken for dead, its requests are aborted: %s", peer.name, reason)
            self.leave(peer)

    def send(self, peer: Peer, data: bytes) -> None:
        """Send it a message, or keep the message until it takes it."""
        if self._by_identity.get(peer.identity) is not peer:
            return  # lost by a message before this one
        if not peer.backlog:
            sent = self._router.send(peer.identity, data)
            if sent:
                return
            if sent is None:
                self.lose(peer, "its connection is gone")
                return
        peer.keep(data)
        if peer.backlog_is_full:
            self.lose(peer, f"it does not read: {peer.backlog_bytes} bytes wait for it")
        else:
            self._behind.add(peer)

    def retry(self) -> None:
        """Send what they had not taken."""
        for peer in list(self._behind):
            while peer.backlog:
                sent = self._router.send(peer.identity, peer.backlog[0])
                if sent is None:
                    self.lose(peer, "its connection is gone")
                if not sent:
                    break
                peer.backlog_bytes -= len(peer.backlog.popleft())
            if not peer.backlog:
                self._behind.discard(peer)

    def excuse_silence(self, seconds: float) -> None:
        """Nobody could be heard for so long."""
        for peer in self._by_identity.values():
            peer.last_heard += seconds
