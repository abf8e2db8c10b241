"""Ports: the taken one is refused by name before anything starts, and free ones differ."""

import asyncio
import socket
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import zmq

from services.launcher.sockets import PortTaken, ReservedPorts, answers_ready, listen


def test_a_taken_port_is_refused_and_named() -> None:
    with listen("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(PortTaken, match=f"port {port} of 127.0.0.1 is taken.*--port"):
            listen("127.0.0.1", port)


def test_free_ports_are_all_different() -> None:
    with ReservedPorts(20, None, "127.0.0.1") as first, ReservedPorts(20, None, "127.0.0.1") as second:
        assert len({*first.ports, *second.ports}) == 40


def test_wanted_ports_count_up_and_none_may_be_taken() -> None:
    with ReservedPorts(1, None, "127.0.0.1") as free:
        (port,) = free.ports
    with ReservedPorts(1, port, "127.0.0.1") as wanted:
        assert wanted.ports == [port]
    with socket.create_server(("127.0.0.1", port)), pytest.raises(PortTaken, match=f"port {port} .* engine 0"):
        ReservedPorts(1, port, "127.0.0.1")


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere ports are only looked up")
def test_a_reserved_port_refuses_clients_until_an_engine_binds_it_and_after_it_has_gone() -> None:
    with ReservedPorts(2, None, "127.0.0.1") as reserved:
        link_port, probe_port = reserved.ports
        for _ in range(2):
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", link_port))
            with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
                router.bind(f"tcp://127.0.0.1:{link_port}")
                socket.create_connection(("127.0.0.1", link_port)).close()
            with ThreadingHTTPServer(("127.0.0.1", probe_port), BaseHTTPRequestHandler):
                socket.create_connection(("127.0.0.1", probe_port)).close()


@pytest.mark.parametrize(
    ("answer", "ready"),
    [(b"HTTP/1.1 200 OK\r\n\r\n", True), (b"HTTP/1.1 503 Service Unavailable\r\n\r\n", False), (b"", False)],
)
def test_only_200_is_ready(answer: bytes, ready: bool) -> None:
    async def ask() -> bool:
        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
            writer.close()

        async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
            return await answers_ready("127.0.0.1", server.sockets[0].getsockname()[1])

    assert asyncio.run(ask()) is ready


def test_nobody_there_is_not_ready() -> None:
    with ReservedPorts(1, None, "127.0.0.1") as reserved:
        assert asyncio.run(answers_ready("127.0.0.1", reserved.ports[0])) is False
