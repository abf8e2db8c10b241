"""Ports: the taken one is refused by name before anything starts, and free ones differ."""

import asyncio
import socket

import pytest

from services.launcher.sockets import PortTaken, answers_ready, engine_ports, listen


def test_a_taken_port_is_refused_and_named() -> None:
    with listen("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(PortTaken, match=f"port {port} of 127.0.0.1 is taken.*--port"):
            listen("127.0.0.1", port)


def test_free_ports_are_all_different() -> None:
    ports = engine_ports(20, None, "127.0.0.1")
    assert len(set(ports)) == 20


def test_wanted_ports_count_up_and_none_may_be_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortTaken, match=f"port {port} .* engine 0"):
            engine_ports(1, port, "127.0.0.1")


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
    (port,) = engine_ports(1, None, "127.0.0.1")
    assert asyncio.run(answers_ready("127.0.0.1", port)) is False
