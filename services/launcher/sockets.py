"""The one listening socket that all frontends share, free ports for the engines, and a look at a health route.

The launcher binds HTTP's port itself: a port that is taken shows before anything is started, no connection is
refused while a frontend restarts, and whichever frontend is free takes the next connection.
"""

import asyncio
import contextlib
import errno
import socket

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


def engine_ports(count: int, first: int | None, host: str) -> list[int]:
    """`first`, `first` + 1 …, where one was asked for (none of them may be taken), else free ones."""
    with contextlib.ExitStack() as held:  # held together, so that no two are the same
        ports = []
        for index in range(count):
            wanted = first + index if first else 0
            try:
                sock = held.enter_context(socket.create_server((host, wanted)))
            except OSError as error:
                raise PortTaken(f"port {wanted} of {host}, for engine {index}, cannot be bound: {error}") from error
            ports.append(sock.getsockname()[1])
        return ports


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
