"""The ZMQ socket under the engine's link. `link` alone uses it, from one thread once it has started."""

from dataclasses import dataclass

import zmq

from services.engine.gatekeeper import Gatekeeper
from shared.link_keys import CURVE_OVERHEAD_BYTES, LinkKeys
from shared.protocol import MAX_MESSAGE_BYTES

QUEUED_MESSAGES_PER_PEER = 1000
# A connection that says nothing holds a descriptor no longer.
HANDSHAKE_TIMEOUT_MS = 10_000


class LinkBindError(Exception):
    """The link's port cannot be bound. The message says which and why."""


@dataclass(slots=True)
class LinkCounts:
    """What went over the socket since the start."""

    messages_in: int = 0
    messages_out: int = 0
    bytes_in: int = 0
    bytes_out: int = 0


class RouterSocket:
    """A bound ROUTER. A frontend that comes back under its identity takes over from its dead connection, and
    sending to one that is not there fails instead of vanishing."""

    def __init__(self, host: str, port: int, keys: LinkKeys | None = None) -> None:
        self.counts = LinkCounts()
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.ROUTER)
        self.socket.set(zmq.IPV6, 1)
        self.socket.set(zmq.ROUTER_HANDOVER, 1)
        self.socket.set(zmq.ROUTER_MANDATORY, 1)
        self.socket.set(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES + (CURVE_OVERHEAD_BYTES if keys else 0))
        self.socket.set(zmq.HANDSHAKE_IVL, HANDSHAKE_TIMEOUT_MS)
        self.socket.set(zmq.SNDHWM, QUEUED_MESSAGES_PER_PEER)
        self.socket.set(zmq.RCVHWM, QUEUED_MESSAGES_PER_PEER)
        self.gatekeeper = Gatekeeper(self._context, self.socket, keys)
        bracketed = f"[{host}]" if ":" in host else host
        try:
            self.socket.bind(f"tcp://{bracketed}:{port or '*'}")
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise LinkBindError(
                f"The link's port {port} on {host} cannot be bound: {error.strerror}. "
                "Choose others with --link-host and --link-port (0 takes a free port)."
            ) from error
        endpoint = self.socket.get_string(zmq.LAST_ENDPOINT)
        self.port = int(endpoint.rstrip("\0").rsplit(":", 1)[1])

    def receive(self) -> list[bytes] | None:
        """The next message's frames, the sender's identity first; None where there is none yet."""
        try:
            frames = self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        self.counts.messages_in += 1
        self.counts.bytes_in += len(frames[-1])
        return frames

    def send(self, identity: bytes, data: bytes) -> bool | None:
        """False: the peer takes nothing now. None: there is no such peer any more."""
        try:
            self.socket.send_multipart((identity, data), zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return None
            raise
        self.counts.messages_out += 1
        self.counts.bytes_out += len(data)
        return True

    def close(self, linger: float) -> None:
        """Give what is queued `linger` seconds to leave."""
        self._context.destroy(linger=int(linger * 1000))
