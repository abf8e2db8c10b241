"""Where a pool's engines are, and when that changes: `static` names them, `dns` asks for one name's addresses,
`kubernetes` watches a Service."""

from collections.abc import Callable
from typing import Protocol

from services.frontend.engines.discovery.dns import DnsDiscovery
from services.frontend.engines.discovery.kubernetes import KubernetesDiscovery
from services.frontend.engines.discovery.static import StaticDiscovery
from services.frontend.settings import EnginePoolSettings

__all__ = ["Discovery", "DnsDiscovery", "KubernetesDiscovery", "StaticDiscovery", "discovery_for"]


class Discovery(Protocol):
    async def watch(self, found: Callable[[set[str]], None]) -> None:
        """Call `found` with every address (numeric host:port) that there is, at first and at each change.

        Runs until it is cancelled. A look-up that fails changes nothing."""
        ...


def discovery_for(pool: EnginePoolSettings, dns_interval: float) -> Discovery:
    """The discovery that the settings ask for. Raises ValueError where an address is not host:port, or the
    Service or its namespace is not known."""
    if pool.discovery == "dns":
        return DnsDiscovery(pool.engine_addresses, dns_interval)
    if pool.discovery == "kubernetes":
        return KubernetesDiscovery(pool.engine_service, pool.engine_namespace, pool.engine_port_name)
    return StaticDiscovery(pool.engine_addresses, dns_interval)
