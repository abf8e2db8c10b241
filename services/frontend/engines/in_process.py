"""The twin of `zmq_link` that needs no socket, for tests: engines in this process, behind made-up addresses.

`in_process_engine` is what stands there. Tests kill, freeze and cut through InProcessTransport.
"""

import asyncio

from services.frontend.engines.in_process_engine import InProcessEngine
from services.frontend.engines.link import LinkListener


class InProcessTransport:
    """Addresses with an engine behind each, or none. A Transport, as ZmqTransport is."""

    def __init__(self) -> None:
        self.engines: dict[str, InProcessEngine] = {}
        self.links: list[InProcessLink] = []
        self._frozen: set[str] = set()

    def open(self, address: str, identity: bytes, listener: LinkListener) -> "InProcessLink":
        return InProcessLink(self, address, identity, listener)

    async def close(self) -> None:
        self.links.clear()

    def run(self, address: str, engine: InProcessEngine) -> None:
        """Put an engine behind an address; it is there at once."""
        self.engines[address] = engine
        engine.send = lambda identity, data: self._to_frontend(engine, identity, data)
        for link in self._links_to(address):
            link.connect()

    def kill(self, address: str) -> None:
        """Take the engine away, as SIGKILL does: the connection closes."""
        del self.engines[address]
        self._frozen.discard(address)
        for link in self._links_to(address):
            link.disconnect("the connection was closed")

    def cut(self, address: str) -> None:
        """Break the connections; the engine lives on, and they are made anew."""
        for link in self._links_to(address):
            link.disconnect("the connection was closed")
            link.reconnect()

    def freeze(self, address: str) -> None:
        """Hold everything in both directions, as SIGSTOP does."""
        self._frozen.add(address)

    def thaw(self, address: str) -> None:
        self._frozen.discard(address)
        for link in self._links_to(address):
            link.flush()

    def is_frozen(self, address: str) -> bool:
        return address in self._frozen

    def _links_to(self, address: str) -> list["InProcessLink"]:
        return [link for link in self.links if link.address == address]

    def hand_over_identity(self, link: "InProcessLink") -> None:
        """As a ROUTER does: a newer connection of one identity takes the place of the older."""
        for other in self.links:
            if other is not link and other.engine is link.engine and other.identity == link.identity:
                other.disconnect("the connection was closed")
                other.reconnect()

    def _to_frontend(self, engine: InProcessEngine, identity: bytes, data: bytes) -> None:
        for link in self.links:
            if link.identity == identity and link.engine is engine:
                link.from_engine(data)


class InProcessLink:
    """A Link whose peer is an InProcessEngine. Everything arrives in order, on a later turn of the loop."""

    def __init__(self, transport: InProcessTransport, address: str, identity: bytes, listener: LinkListener) -> None:
        self.address = address
        self.identity = identity
        self.engine: InProcessEngine | None = None
        self.blocked = False
        self._transport = transport
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._closed = False
        self._epoch = 0  # what was under way on an earlier connection is not delivered
        self._held_to_engine: list[bytes] = []
        self._held_to_frontend: list[bytes] = []
        transport.links.append(self)
        self.connect()

    def send(self, data: bytes) -> bool:
        if self.engine is None or self.blocked:
            return False
        self._loop.call_soon(self._arrive, self._epoch, data)
        return True

    def reset(self) -> None:
        self._drop()
        self.connect()

    def close(self) -> None:
        # Like a linger: what was sent before still arrives.
        self._closed = True
        self._transport.links.remove(self)

    def connect(self) -> None:
        if self.engine is None and self.address in self._transport.engines:
            self._loop.call_soon(self._connected, self._epoch)

    def reconnect(self, turns: int = 8) -> None:
        """Connect again after a while, which is longer than a message takes to come and go."""
        if turns:
            self._loop.call_soon(self.reconnect, turns - 1)
        else:
            self.connect()

    def disconnect(self, reason: str) -> None:
        if self.engine is not None:
            self._drop()
            self._loop.call_soon(self._disconnected, reason)

    def from_engine(self, data: bytes) -> None:
        self._loop.call_soon(self._received, self._epoch, data)

    def flush(self) -> None:
        """Deliver what a frozen engine did not take and did not say."""
        to_engine, self._held_to_engine = self._held_to_engine, []
        to_frontend, self._held_to_frontend = self._held_to_frontend, []
        for data in to_engine:
            self._loop.call_soon(self._arrive, self._epoch, data)
        for data in to_frontend:
            self._loop.call_soon(self._received, self._epoch, data)
        self.connect()

    def _drop(self) -> None:
        self._epoch += 1
        self.engine = None
        self._held_to_engine.clear()
        self._held_to_frontend.clear()

    def _connected(self, epoch: int) -> None:
        engine = self._transport.engines.get(self.address)
        frozen = self._transport.is_frozen(self.address)
        if epoch == self._epoch and not self._closed and self.engine is None and engine is not None and not frozen:
            self.engine = engine
            self._transport.hand_over_identity(self)
            self._listener.link_up()

    def _disconnected(self, reason: str) -> None:
        if not self._closed:
            self._listener.link_down(reason)

    def _arrive(self, epoch: int, data: bytes) -> None:
        if epoch != self._epoch or self.engine is None:
            return
        if self._transport.is_frozen(self.address):
            self._held_to_engine.append(data)
        else:
            self.engine.receive(self.identity, data)

    def _received(self, epoch: int, data: bytes) -> None:
        if epoch != self._epoch or self._closed:
            return
        if self._transport.is_frozen(self.address):
            self._held_to_frontend.append(data)
        else:
            self._listener.link_received(data)
