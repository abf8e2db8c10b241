"""What goes over an encrypted link and what does not: other protocols, the largest message, anything readable."""

import asyncio
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
import zmq
from engine_harness import LinkFrontend, wait_until

from services.engine import gatekeeper, router_socket
from services.frontend.engines import EnginePool, zmq_link
from shared.link_keys import read_link_keys
from tests.integration.link_encryption.encrypted_link import (
    OpenEngine,
    until,
    with_pool,
)


@pytest.mark.parametrize(
    "greeting",
    [
        # ZMTP 1.0 (an empty identity), 2.0 (its signature, revision 1, a DEALER's type), 3.0 with NULL, 3.1 with PLAIN.
        b"\x01\x00\x03\x00abc",
        b"\xff" + b"\0" * 8 + b"\x7f" + b"\x01\x05" + b"\0\0" + b"\0\x03abc",
        b"\xff" + b"\0" * 8 + b"\x7f" + b"\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" * 32 + b"\x04\x06\x05READY",
        b"\xff" + b"\0" * 8 + b"\x7f" + b"\x03\x01" + b"PLAIN".ljust(20, b"\0") + b"\0" * 32 + b"\x04\x08\x05HELLO\0\0",
        b"GET / HTTP/1.1\r\nHost: engine\r\n\r\n" + b"\0" * 64,
    ],
    ids=["zmtp 1", "zmtp 2", "null", "plain", "http"],
)
def test_other_and_older_protocols_do_not_slip_past(open_engine: OpenEngine, keys: Path, greeting: bytes) -> None:
    link = open_engine(keys)
    with socket.create_connection(("127.0.0.1", link.port), timeout=10) as stranger:
        stranger.sendall(greeting)
        received = b""
        while data := _receive(stranger):
            received += data
        # Nothing but the engine's own greeting (64 bytes), and no command that lets anybody in.
        assert b"READY" not in received
        assert b"WELCOME" not in received
    assert len(link.peers) == 0


def _receive(connection: socket.socket) -> bytes:
    try:
        return connection.recv(4096)
    except ConnectionResetError:
        return b""


def test_nobody_gets_in_where_no_gatekeeper_answers(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gatekeeper, "ZAP_ADDRESS", "inproc://elsewhere")
    context: zmq.Context[Any] = zmq.Context()
    router = router_socket.RouterSocket("127.0.0.1", 0, read_link_keys(keys, "engine"))
    frontend_keys = read_link_keys(keys, "frontend")
    try:
        dealer = context.socket(zmq.DEALER)
        dealer.set(zmq.HANDSHAKE_IVL, 300)
        dealer.set(zmq.CURVE_PUBLICKEY, frontend_keys.public)
        dealer.set(zmq.CURVE_SECRETKEY, frontend_keys.secret)
        dealer.set(zmq.CURVE_SERVERKEY, frontend_keys.peers[0])
        watch = dealer.get_monitor_socket(zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED)
        dealer.connect(f"tcp://127.0.0.1:{router.port}")
        assert watch.poll(10_000)
        event = int.from_bytes(watch.recv_multipart()[0][:2], "little")
        assert event == zmq.Event.DISCONNECTED
    finally:
        context.destroy(linger=0)
        router.close(linger=0)


def test_the_largest_message_passes_encrypted(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    largest = 200_000
    for module in (router_socket, zmq_link):
        monkeypatch.setattr(module, "MAX_MESSAGE_BYTES", largest)
    router = router_socket.RouterSocket("127.0.0.1", 0, read_link_keys(keys, "engine"))
    received: list[bytes] = []

    class Listener:
        ups = downs = 0

        def link_up(self) -> None:
            self.ups += 1

        def link_down(self, reason: str) -> None:
            self.downs += 1

        def link_failed(self, reason: str) -> None:
            pytest.fail(reason)

        def link_received(self, data: bytes) -> None:
            received.append(data)

    async def main() -> None:
        transport = zmq_link.ZmqTransport(1, 5, read_link_keys(keys, "frontend"))
        listener = Listener()
        ended = threading.Event()

        def serve() -> None:
            while not ended.is_set():
                for each in router.gatekeeper.sockets:
                    if each.poll(1):
                        router.gatekeeper.attend([each])
                if frames := router.receive():
                    router.send(*frames)

        serving = threading.Thread(target=serve)
        serving.start()
        try:
            link = transport.open(f"127.0.0.1:{router.port}", b"frontend", listener)
            await until(lambda: listener.ups == 1, "the link is up")
            assert link.send(b"x" * largest)
            await until(lambda: bool(received) or listener.downs > 0, "it came back")
            assert (len(received[0]), listener.downs) == (largest, 0)
            link.close()
        finally:
            ended.set()
            serving.join()
            router.close(linger=0)
            await transport.close()

    asyncio.run(main())


class Wiretap:
    """A TCP proxy that remembers every byte of both directions."""

    def __init__(self, target: int) -> None:
        self.heard = bytearray()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._target = target
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self._target))
            for source, sink in ((client, server), (server, client)):
                threading.Thread(target=self._pass_on, args=(source, sink), daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                self.heard += data
                sink.sendall(data)
        except OSError:
            pass
        finally:
            sink.close()

    def close(self) -> None:
        self._listener.close()


@pytest.mark.parametrize("encrypted", [True, False])
def test_nothing_can_be_read_on_the_way(open_engine: OpenEngine, keys: Path, encrypted: bool) -> None:
    of_both = keys if encrypted else None
    link = open_engine(of_both)
    wiretap = Wiretap(link.port)

    async def body(pool: EnginePool) -> None:
        await until(lambda: pool.ready, "the pool is ready")

    with_pool(wiretap.port, of_both, body)
    wiretap.close()
    assert len(wiretap.heard) > 200
    assert (b"a-model-name-to-look-for" in wiretap.heard) is not encrypted


def test_a_plain_link_counts_what_is_no_frontend(open_engine: OpenEngine) -> None:
    link = open_engine(None)
    with socket.create_connection(("127.0.0.1", link.port), timeout=10) as stranger:
        stranger.sendall(b"\xff" + b"\0" * 8 + b"\x7f" + b"\x03\x00" + b"CURVE".ljust(20, b"\0") + b"\0" * 32)
        wait_until(lambda: link.handshake_failures[gatekeeper.ENCRYPTION_MISMATCH] == 1, "it is counted")
    with LinkFrontend(link.port) as frontend:
        frontend.hello()
