"""The probes' port under abuse: it stays small, and answers again once the abuse is over."""

import http.client
import socket
import threading
import urllib.request
from collections.abc import Iterator

import pytest

from services.engine import probes
from services.engine.probes import Probes


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(probes, "MAX_CONNECTIONS", 4)
    server = Probes("127.0.0.1", 0, lambda: None, lambda: "it loads", lambda accept: (b"", "text/plain"))
    server.start()
    yield server.port
    server.close()


def live(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health/live", timeout=5) as response:
            return response.status == 200
    except OSError:
        return False


def test_connections_that_stay_open_do_not_become_threads_without_end(port: int) -> None:
    before = threading.active_count()
    connections = [socket.create_connection(("127.0.0.1", port), timeout=5) for _ in range(40)]
    closed = 0
    for connection in connections[4:]:
        closed += connection.recv(1) == b""
    assert closed == 36
    assert threading.active_count() - before <= 4
    assert not live(port)
    for connection in connections:
        connection.close()
    while not live(port):
        pass


@pytest.mark.parametrize(
    ("path", "status"), [("/health/live", 200), ("/health/ready", 503), ("/metrics", 200), ("/", 404)]
)
def test_head_is_answered_as_get_without_the_body(port: int, path: str, status: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    heads = []
    for method in ("HEAD", "GET", "HEAD"):  # on one connection: what follows a head is the next head
        connection.request(method, path)
        response = connection.getresponse()
        body = response.read()
        assert response.status == status
        assert len(body) == (0 if method == "HEAD" else int(response.headers["content-length"]))
        heads.append([(name, value) for name, value in response.getheaders() if name != "Date"])
    assert heads[0] == heads[1] == heads[2]
    connection.close()


@pytest.mark.parametrize(
    "sent", [b"\x16\x03\x01garbage\r\n\r\n", b"POST /health/live HTTP/1.1\r\n\r\n", b"GET " + b"a" * 70_000]
)
def test_garbage_disturbs_nobody(port: int, sent: bytes, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
        connection.sendall(sent)
    while not live(port):
        pass
    assert "Traceback" not in capfd.readouterr().err
