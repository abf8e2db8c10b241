"""Turning host:port into numeric addresses without blocking the event loop."""

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Awaitable, Callable

logger = logging.getLogger(__name__)

Resolve = Callable[[str, int], Awaitable[list[str]]]


def split_address(address: str) -> tuple[str, int]:
    """Host and port of host:port or [ipv6]:port.

    >>> split_address("[::1]:5555")
    ('::1', 5555)
    """
    host, colon, port = address.rpartition(":")
    bracketed = host.startswith("[") and host.endswith("]")
    if bracketed:
        host = host[1:-1]
    if not colon or not host or (":" in host and not bracketed) or not port.isascii() or not port.isdigit():
        raise ValueError(f"engine address {address!r} must be host:port, such as 10.0.0.7:5555 or [fd00::7]:5555")
    if not 0 < int(port) < 65536:
        raise ValueError(f"engine address {address!r} has a port outside 1 to 65535")
    return host, int(port)


def join_address(host: str, port: int) -> str:
    """host:port, or [host]:port for IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_numeric(host: str) -> bool:
    """Whether the host is an IP address and needs no look-up."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


async def resolve(host: str, port: int) -> list[str]:
    """Every address of a name, IPv4 first, each once. Raises OSError when the look-up fails."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    hosts = sorted({str(entry[4][0]) for entry in found}, key=lambda host: (":" in host, host))
    return [join_address(host, port) for host in hosts]


class Name:
    """One host:port that is looked up again and again; what is known stays while a look-up fails."""

    def __init__(self, address: str, resolve: Resolve = resolve) -> None:
        self._host, self._port = split_address(address)
        self._resolve = resolve
        self._fails = False
        self.addresses: list[str] = []

    async def look_up(self) -> list[str]:
        """The addresses now, or those of the last look-up that gave any."""
        try:
            found = await self._resolve(self._host, self._port)
        except (OSError, UnicodeError) as error:
            found, problem = [], str(error)
        else:
            problem = "the name has no addresses"
        if found:
            if self._fails:
                logger.info("%s is found again: %s", self._host, ", ".join(found))
            self._fails = False
            self.addresses = found
        elif not self._fails:
            self._fails = True
            kept = f"; still using {', '.join(self.addresses)}" if self.addresses else "; no engine is known there yet"
            logger.warning("cannot look up %s: %s%s (trying on)", self._host, problem, kept)
        return self.addresses
