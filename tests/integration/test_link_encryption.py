"""The link under CURVE, over real sockets: who has the right key gets in, all others are told, logged and counted."""

import asyncio
import itertools
import logging
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import zmq
from engine_harness import LinkFrontend, make_settings, wait_until, write_model

from loadtest.server_process import ServerProcess
from services.engine import gatekeeper, router_socket
from services.engine.executor.interface import ModelDescription
from services.engine.link import Link
from services.engine.link_items import FromPeer
from services.engine.mailbox import Inbox
from services.frontend.engines import EnginePool, zmq_link
from services.frontend.metrics.catalogue import HANDSHAKE_FAILURES
from services.frontend.metrics.pools import engine_values
from services.frontend.settings import EnginePoolSettings, FrontendSettings
from shared.link_keys import read_link_keys, write_link_keys
from shared.protocol import Load, ModelLimits
from tests.free_port import free_port

LIMITS = ModelLimits(100, 50, [2], 4, 9)

OpenEngine = Callable[..., Link]
StartServer = Callable[..., ServerProcess]


def make_keys(folder: Path) -> Path:
    write_link_keys(folder)
    return folder


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    return make_keys(tmp_path / "keys")


@pytest.fixture
def other_keys(tmp_path: Path) -> Path:
    return make_keys(tmp_path / "other-keys")


@pytest.fixture
def open_engine(tmp_path: Path) -> Iterator[OpenEngine]:
    """Starts a Link with the keys of a folder. Its loop is nobody: what frontends send is left where it is."""
    model = write_model(tmp_path / "model")
    links: list[Link] = []

    def open_one(keys: Path | None, port: int = 0) -> Link:
        inbox: Inbox[FromPeer] = Inbox(1 << 20)
        link = Link(
            make_settings(model, link_port=port, heartbeat_interval=0.2, heartbeat_timeout=30.0),
            ModelDescription("a-model-name-to-look-for", "print", LIMITS),
            LIMITS,
            b"engine",
            inbox,
            is_alive=lambda: True,
            on_end=lambda error: None,
            keys=None if keys is None else read_link_keys(keys, "engine"),
        )
        link.start(Load(free_blocks=7))
        links.append(link)
        return link

    yield open_one
    for link in links:
        close(link)


def close(link: Link) -> None:
    link.stop(linger=0.1)
    assert link.join(10)


def with_pool(port: int, keys: Path | None, body: Callable[[EnginePool], Coroutine[Any, Any, None]]) -> None:
    """Run `body` with a frontend's pool whose one engine is at `port`."""

    async def main() -> None:
        settings = FrontendSettings.model_validate({"link_keys": keys, "heartbeat_interval": 0.2})
        engines = EnginePoolSettings(engine_addresses=[f"127.0.0.1:{port}"])
        pool = EnginePool("model", settings, engines, lambda welcome: None)
        await pool.start()
        try:
            await body(pool)
        finally:
            await pool.stop()

    asyncio.run(main())


async def until(condition: Callable[[], bool], what: str) -> None:
    try:
        async with asyncio.timeout(20):
            while not condition():
                await asyncio.sleep(0.005)
    except TimeoutError:
        pytest.fail(f"not within 20 s: {what}")


def test_the_right_key_gets_in(open_engine: OpenEngine, keys: Path) -> None:
    link = open_engine(keys)

    async def body(pool: EnginePool) -> None:
        await until(lambda: pool.ready, "the pool is ready")
        assert (pool.num_refusing, pool.counts.handshake_failures) == (0, 0)

    with_pool(link.port, keys, body)
    assert not any(link.handshake_failures.values())


@pytest.mark.parametrize(
    ("engine_has", "frontend_has", "reason", "engine_says", "frontend_says"),
    [
        pytest.param(
            {"engine.secret": "keys", "frontend.public": "other"},
            {"engine.public": "keys", "frontend.secret": "keys"},
            gatekeeper.UNKNOWN_KEY,
            "A frontend at 127.0.0.1 was turned away: its key is not one of those",
            "it does not let this frontend's key in",
            id="frontend's key is unknown",
        ),
        pytest.param(
            {"engine.secret": "keys", "frontend.public": "keys"},
            {"engine.public": "other", "frontend.secret": "keys"},
            gatekeeper.WRONG_ENGINE_KEY,
            "it takes this engine for one with another key",
            "it has another key than engine.public",
            id="engine's key is another",
        ),
        pytest.param(
            {"engine.secret": "keys", "frontend.public": "keys"},
            None,
            gatekeeper.ENCRYPTION_MISMATCH,
            "this link is encrypted, and its is not",
            "encrypted",
            id="frontend has none",
        ),
        pytest.param(
            None,
            {"engine.public": "keys", "frontend.secret": "keys"},
            None,
            "",
            "this side of the link is encrypted, and the engine's is not",
            id="engine has none",
        ),
    ],
)
def test_who_has_not_the_right_key_is_told_logged_and_counted(
    open_engine: OpenEngine,
    tmp_path: Path,
    keys: Path,
    other_keys: Path,
    caplog: pytest.LogCaptureFixture,
    engine_has: dict[str, str] | None,
    frontend_has: dict[str, str] | None,
    reason: str | None,
    engine_says: str,
    frontend_says: str,
) -> None:
    caplog.set_level(logging.INFO)

    def assemble(name: str, files: dict[str, str] | None) -> Path | None:
        if files is None:
            return None
        folder = tmp_path / name
        folder.mkdir()
        for file, source in files.items():
            (folder / file).write_bytes(((keys if source == "keys" else other_keys) / file).read_bytes())
        return folder

    link = open_engine(assemble("engine", engine_has))

    async def body(pool: EnginePool) -> None:
        await until(lambda: pool.counts.handshake_failures >= 2, "it is tried again, and counted")
        if reason is not None:
            await until(lambda: link.handshake_failures[reason] >= 1, "the engine counts it")
        await until(lambda: frontend_says in caplog.text, "the frontend says why")
        assert not pool.ready
        assert pool.num_refusing == 1
        (failures,) = engine_values("model", pool)[HANDSHAKE_FAILURES].values()
        assert isinstance(failures, int)
        assert failures >= 2

    with_pool(link.port, assemble("frontend", frontend_has), body)
    assert engine_says in caplog.text
    assert len(link.peers) == 0
    for folder in (keys, other_keys):
        for file in folder.iterdir():
            assert file.read_text().strip() not in caplog.text, "a key is in the log"
    told = [record for record in caplog.records if "no link to engine" in record.message]
    assert 1 <= len(told) <= 4, "once for each thing that was found wrong, not for each attempt"


def test_a_refused_frontend_gets_in_once_its_key_is_allowed(
    open_engine: OpenEngine, tmp_path: Path, keys: Path, other_keys: Path
) -> None:
    # libzmq gives a connection up whose handshake failed: the link must begin anew.
    strict = make_keys(tmp_path / "strict")
    for name in ("engine.secret", "engine.public"):
        (strict / name).write_bytes((keys / name).read_bytes())
    first = open_engine(strict)

    async def body(pool: EnginePool) -> None:
        await until(lambda: pool.num_refusing == 1, "the frontend is refused")
        await asyncio.to_thread(close, first)
        open_engine(keys, first.port)
        await until(lambda: pool.ready, "the frontend got in")
        assert pool.num_refusing == 0

    with_pool(first.port, keys, body)


def test_keys_are_rotated_with_old_and_new_side_by_side(open_engine: OpenEngine, tmp_path: Path) -> None:
    old, new = make_keys(tmp_path / "old"), make_keys(tmp_path / "new")

    def both(name: str, first: Path, second: Path) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        for path in first.iterdir():
            (folder / path.name).write_bytes(path.read_bytes() + (second / path.name).read_bytes())
        return folder

    steps = [old, both("step 1", old, new), both("step 2", new, old), new]
    for earlier, later in itertools.pairwise(steps):
        for engine_keys, frontend_keys in ((earlier, later), (later, earlier)):
            link = open_engine(engine_keys)

            async def body(pool: EnginePool) -> None:
                await until(lambda: pool.ready, "pods of both sides of a step speak with each other")
                assert pool.counts.handshake_failures == 0, "a key that is tried in turn is no failure"

            with_pool(link.port, frontend_keys, body)


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


def test_a_server_with_keys_serves(start_server: StartServer, smollm2: Path, keys: Path) -> None:
    server = start_server("--executor", "simulated", "--engines", "2", "--link-keys", str(keys))
    body = {"model": smollm2.name, "prompt": "Once", "max_tokens": 5}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    assert server.log.count("The link is encrypted") == 2
    for engine in server.engines:
        metrics = httpx.get(f"http://127.0.0.1:{engine['probe_port']}/metrics").text
        assert "tandem_engine_frontends 1.0" in metrics
        assert 'tandem_engine_handshake_failures_total{reason="unknown_key"} 0.0' in metrics
    assert "engines_without_link" not in httpx.get(f"{server.url}/health").json()


@pytest.mark.parametrize("service", ["engine", "frontend"])
def test_a_malformed_key_ends_the_start_and_is_not_shown(smollm2: Path, keys: Path, service: str) -> None:
    secret = "not-a-key-but-still-a-secret"
    (keys / f"{service}.secret").write_text(secret)
    command = [sys.executable, "-m", "services.command", service, "--model", str(smollm2), "--link-keys", str(keys)]
    done = subprocess.run([*command], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert f"{service}.secret, line 1: {len(secret)} characters where a key has 40" in done.stderr
    assert "Traceback" not in done.stderr
    assert secret not in done.stdout + done.stderr


def test_a_frontend_with_another_key_says_so_in_its_health(
    start_server: StartServer, smollm2: Path, keys: Path, other_keys: Path
) -> None:
    server = start_server("--executor", "simulated", "--link-keys", str(keys))
    (engine,) = server.engines
    port = free_port()
    flags = ["--model", str(smollm2), "--port", str(port), "--link-keys", str(other_keys)]
    flags += ["--engine-addresses", f"127.0.0.1:{engine['link_port']}"]
    command = [sys.executable, "-m", "services.command", "frontend", *flags]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            name = str(smollm2)

            def health() -> Any:
                try:
                    return httpx.get(f"http://127.0.0.1:{port}/health/ready")
                except httpx.TransportError:
                    return None

            wait_until(
                lambda: (answer := health()) is not None and "engines_without_link" in answer.json(),
                "the health tells of it",
                timeout=60,
            )
            answer = health()
            assert answer.status_code == 503
            assert answer.json() == {
                "status": "no engine",
                "models": {name: False},
                "engines_without_link": {name: 1},
            }
        finally:
            process.kill()
    assert "it takes this engine for one with another key" in server.log
    probes = httpx.get(f"http://127.0.0.1:{engine['probe_port']}/health/ready")
    assert probes.status_code == 200, "a stranger's key must not make an engine unready"
