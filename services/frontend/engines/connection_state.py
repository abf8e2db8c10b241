"""The states of a connection to an engine, and whom it tells of them: `pool`."""

import enum
from typing import TYPE_CHECKING, Protocol

from services.frontend.engines.counts import DispatchCounts
from services.frontend.engines.in_flight import InFlight
from shared.protocol import FinishReason, Quarantined, Welcome

if TYPE_CHECKING:
    from services.frontend.engines.connection import EngineConnection


class ConnectionState(enum.Enum):
    CONNECTING = enum.auto()  # no WELCOME yet, or the engine was lost and is sought again
    READY = enum.auto()
    DRAINING = enum.auto()  # finishes what it has, takes nothing new
    PARTED = enum.auto()  # it drains, and was told that nothing of this process is left there
    REFUSED = enum.auto()  # answers, but must not be used
    CLOSED = enum.auto()


class ConnectionOwner(Protocol):
    """Whom a connection tells what became of it and of its requests."""

    @property
    def counts(self) -> DispatchCounts: ...

    def refusal(self, connection: "EngineConnection", welcome: Welcome) -> str | None:
        """Why this engine must not be used, or None. May close the connection."""
        ...

    def state_changed(self, connection: "EngineConnection") -> None:
        """Its state, or whether it can take a request, is another than before."""
        ...

    def handshake_failed(self, connection: "EngineConnection") -> None:
        """It reached a peer that it cannot speak with: a wrong key, most likely."""
        ...

    def lost(self, connection: "EngineConnection", requests: list[InFlight], died: bool) -> None:
        """The engine has these no longer. `died`: it went without notice."""
        ...

    def survived(self, connection: "EngineConnection") -> None:
        """The engine that was lost is there again, the same process as before."""
        ...

    def quarantined(self) -> list[Quarantined]:
        """The prompts that every engine should refuse."""
        ...

    def returned(self, connection: "EngineConnection", request: InFlight, reason: FinishReason) -> None:
        """The engine gave this back: OVERLOADED or HANDED_OVER."""
        ...

    def finished(self, request: InFlight) -> None:
        """The sink has all that it will get."""
        ...
