"""Every address of one name (a headless service has one for each ready pod), looked up again and again."""

import asyncio
from collections.abc import Callable, Sequence

from services.frontend.engines.discovery.names import Name, Resolve, resolve


class DnsDiscovery:
    """Engines behind one name, or a few. Raises ValueError where one is not host:port."""

    def __init__(self, names: Sequence[str], interval: float, resolve: Resolve = resolve) -> None:
        self._names = [Name(name, resolve) for name in names]
        self._interval = interval

    async def watch(self, found: Callable[[set[str]], None]) -> None:
        known: set[str] = set()
        while True:
            looked_up = await asyncio.gather(*(name.look_up() for name in self._names))
            addresses = {address for each in looked_up for address in each}
            if addresses != known:
                known = addresses
                found(set(addresses))
            await asyncio.sleep(self._interval)
