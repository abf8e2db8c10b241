"""Ports for servers that must be reachable where a test said so: before they start, or again after they were killed."""

import random
import socket

# Below every system's ephemeral ports: one of those may become the source port of any connection on this machine
# between the asking and the listening.
_PORTS = range(10_000, 32_000)


def free_port() -> int:
    while True:
        port = random.SystemRandom().choice(_PORTS)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
