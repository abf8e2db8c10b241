"""A fixed list of engines. One that is given by name is looked up again, since its pod may restart elsewhere."""

import asyncio
from collections.abc import Callable, Sequence

from services.frontend.engines.discovery.names import Name, Resolve, is_numeric, join_address, resolve, split_address


class StaticDiscovery:
    """One engine for each entry. Raises ValueError where one is not host:port."""

    def __init__(self, addresses: Sequence[str], interval: float, resolve: Resolve = resolve) -> None:
        split = [split_address(address) for address in addresses]
        self._fixed = {join_address(host, port) for host, port in split if is_numeric(host)}
        self._names = [Name(join_address(host, port), resolve) for host, port in split if not is_numeric(host)]
        self._interval = interval

    async def watch(self, found: Callable[[set[str]], None]) -> None:
        found(set(self._fixed))
        current: dict[Name, str] = {}
        while self._names:
            await asyncio.gather(*(name.look_up() for name in self._names))
            previous = dict(current)
            for name in self._names:
                # One entry is one engine: its address changes only when the old one is gone.
                if name.addresses and current.get(name) not in name.addresses:
                    current[name] = name.addresses[0]
            if current != previous:
                found(self._fixed | set(current.values()))
            await asyncio.sleep(self._interval)
        await asyncio.Event().wait()
