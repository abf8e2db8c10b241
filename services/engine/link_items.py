"""What goes between the loop's thread and the link's, besides the protocol's own messages."""

from dataclasses import dataclass

from services.engine.core import OutputsByPeer
from services.engine.kv_cache import BlockEvents
from shared.protocol import Abort, Add, Heartbeat, Load
from shared.tracing import FinishedSpan


@dataclass(frozen=True, slots=True)
class PeerJoined:
    """A frontend said HELLO, perhaps again: it knows of no request here, and of no block."""


@dataclass(frozen=True, slots=True)
class PeerLeft:
    """A frontend said GOODBYE, or is taken for dead."""


FromPeer = tuple[bytes, Add | Abort | Heartbeat | PeerJoined | PeerLeft]


@dataclass(frozen=True, slots=True)
class StepOutputs:
    """What a step brought, for all frontends."""

    outputs: OutputsByPeer
    load: Load
    events: BlockEvents


@dataclass(frozen=True, slots=True)
class CacheContent:
    """All stored blocks, for a frontend that has just joined."""

    peer: bytes
    stored: list[int]


@dataclass(frozen=True, slots=True)
class Spans:
    """What is known of sampled requests, for their traces."""

    spans: list[FinishedSpan]


@dataclass(frozen=True, slots=True)
class Draining:
    """The engine takes no new requests from now on."""

    reason: str


@dataclass(frozen=True, slots=True)
class Stop:
    """Send what is left within so many seconds, and end."""

    linger: float
