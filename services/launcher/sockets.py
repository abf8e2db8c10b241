"""The one listening socket that all frontends share, free ports for the engines, and a look at a health route.

The launcher binds HTTP's port itself: a port that is taken shows before anything is started, no connection is
refused while a frontend restarts, and whichever frontend is free takes the next connection.
"""

import asyncio
import errno
import socket
import sys
from typing import Self

_BACKLOG = 2048
_TAKEN = (errno.EADDRINUSE, errno.EACCES)


class PortTaken(RuntimeError):
    """Something else listens there; the message says where, and what to do."""


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises PortTaken, or OSError for an address that this machine does not have."""
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        if error.errno in _TAKEN:
            raise PortTaken(f"port {port} of {host} is taken by another program; choose one with --port") from error
        raise


class ReservedPorts:
    """Ports kept for the engines, which bind them only once their model is loaded, and again after a restart.

    A bound socket that never listens keeps the kernel from giving the port to anybody else, while Linux lets an
    engine that sets SO_REUSEADDR, as ZMQ and http.server do, listen on it. Elsewhere the ports are only looked up.
    """

    def __init__(self, count: int, first: int | None, host: str) -> None:
        """`first`, `first` + 1 … where one was asked for, else free ones. Raises PortTaken."""
        self.ports: list[int] = []
        self._held: list[socket.socket] = []
        for index in range(count):
            wanted = first + index if first else 0
            try:
                if wanted:
                    socket.create_server((host, wanted)).close()  # does anybody listen there?
                self._reserve(host, wanted)
            except OSError as error:
                self.release()
                raise PortTaken(f"port {wanted} of {host}, for engine {index}, cannot be bound: {error}") from error
        if sys.platform != "linux":
            self.release()

    def _reserve(self, host: str, port: int) -> None:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        held = socket.socket(family, socket.SOCK_STREAM)
        self._held.append(held)
        held.bind((host, port))  # without SO_REUSEADDR first, so that a free port is nobody else's reservation
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.ports.append(held.getsockname()[1])

    def release(self) -> None:
        for held in self._held:
            held.close()
        self._held.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


async def answers_ready(host: str, port: int) -> bool:
    """Whether GET /health/ready answers 200 within two seconds, over a connection of its own."""
    try:
        async with asyncio.timeout(2.0):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(f"GET /health/ready HTTP/1.1\r\nHost: {host}:{port}\r\nConnection: close\r\n\r\n".encode())
                status_line = await reader.readline()
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return False
    return status_line.split(b" ")[1:2] == [b"200"]


def reachable_host(host: str) -> str:
    """The address to connect to for a server that binds `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
