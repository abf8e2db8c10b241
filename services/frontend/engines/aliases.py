"""Addresses that lead to an engine which is already connected by another (IPv4 and IPv6, say): the two connections
would take the engine's one place for this frontend from each other. `pool` asks."""

from collections.abc import Callable, Iterable, Set

from services.frontend.engines.connection import EngineConnection
from services.frontend.engines.connection_state import ConnectionState
from shared.protocol import Welcome


class Aliases:
    """The second addresses of one pool. An engine that was lost keeps its own for `lost_seconds` of `clock`."""

    def __init__(self, lost_seconds: float, clock: Callable[[], float]) -> None:
        self.addresses: dict[str, bytes] = {}  # to the boot id of the engine there
        self._lost_seconds = lost_seconds
        self._clock = clock

    def keep_only(self, found: Set[str]) -> None:
        """Forget the addresses that discovery no longer names."""
        for address in self.addresses.keys() - found:
            del self.addresses[address]

    def is_alias(self, connection: EngineConnection, welcome: Welcome, others: Iterable[EngineConnection]) -> bool:
        """Whether one of the others has this engine. One that had it, and has it no more, is closed as the alias."""
        for other in list(others):
            if other is connection or other.welcome is None or other.welcome.boot_id != welcome.boot_id:
                continue
            if self._has(other, welcome.boot_id):
                self.addresses[connection.address] = welcome.boot_id
                return True
            self.addresses[other.address] = welcome.boot_id
            other.close()
        return False

    def forget_unused(self, connections: Iterable[EngineConnection]) -> None:
        """Forget those whose engine no connection has any more: they are connected to again."""
        for address, boot_id in list(self.addresses.items()):
            if not any(self._has(connection, boot_id) for connection in connections):
                del self.addresses[address]

    def _has(self, connection: EngineConnection, boot_id: bytes) -> bool:
        """Whether this is the connection to that engine, if only a moment ago."""
        return (
            connection.welcome is not None
            and connection.welcome.boot_id == boot_id
            and (
                connection.state is not ConnectionState.CONNECTING
                or self._clock() - connection.lost_at < self._lost_seconds
            )
        )
