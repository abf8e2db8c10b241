"""Connections that misbehave: heads without end, silence, requests ahead of their answers, offers to upgrade."""

import errno
import json
import socket
import sys

import pytest
from echo_app import EchoPool, LiveServer
from test_live_streams import CHAT, answers, post, until

from services.frontend.http import protocol
from services.frontend.http.middleware import body_limit


def connect(server: LiveServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=20)


def request(path: str, body: object, *headers: str) -> bytes:
    data = json.dumps(body).encode()
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: t",
        "Content-Type: application/json",
        f"Content-Length: {len(data)}",
        *headers,
    ]
    return "\r\n".join([*lines, "", ""]).encode() + data


def read_to_end(connection: socket.socket) -> bytes:
    received = b""
    try:
        while data := connection.recv(65536):
            received += data
    except ConnectionResetError:
        pass
    return received


def flood(connection: socket.socket, piece: bytes) -> bytes:
    """Send without end until the server ends it; what it answered."""
    with pytest.raises((BrokenPipeError, ConnectionResetError)):
        _send_for_ever(connection, piece)
    return read_to_end(connection)


def _send_for_ever(connection: socket.socket, piece: bytes) -> None:
    for _ in range(1_000_000):
        connection.sendall(piece)


@pytest.mark.parametrize(
    ("begin", "piece"),
    [
        (b"GET /v1/models HTTP/1.1\r\nHost: t\r\n", b"X-Header: " + b"a" * 10_000 + b"\r\n"),
        (b"GET /v1/models HTTP/1.1\r\nX-Header: ", b"a" * 10_000),
        (b"GET /", b"a" * 10_000),
    ],
)
def test_a_head_without_end(live: LiveServer, begin: bytes, piece: bytes):
    connection = connect(live)
    connection.sendall(begin)
    flood(connection, piece)
    answers(live)


def test_a_head_just_over_the_limit_is_told_so(live: LiveServer):
    connection = connect(live)
    connection.sendall(b"GET /v1/models HTTP/1.1\r\nHost: t\r\nX-Header: ")
    connection.sendall(b"a" * protocol.MAX_HEAD_BYTES)
    answer = read_to_end(connection)
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert "limit" in json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]


def test_a_long_head_within_the_limit_and_a_body_after_it(live: LiveServer):
    connection = connect(live)
    body = {"prompt": "a" * 200_000}
    data = request("/tokenize", body, "X-Header: " + "a" * 60_000, "Connection: close")
    for begin in range(0, len(data), 30_000):
        connection.sendall(data[begin : begin + 30_000])
    assert read_to_end(connection).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("sent", [b"", b"GET /v1/models HTTP/1.1\r\nHost: t\r\n"])
def test_a_head_that_does_not_come(live: LiveServer, monkeypatch: pytest.MonkeyPatch, sent: bytes):
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.05)
    connection = connect(live)
    connection.sendall(sent)
    assert read_to_end(connection) == b""


def test_a_second_head_that_does_not_come(live: LiveServer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 1)
    connection = connect(live)
    connection.sendall(request("/tokenize", {"prompt": "x"}) + b"GET /v1/mod")
    connection.sendall(b"els HT")
    assert read_to_end(connection).startswith(b"HTTP/1.1 200 ")


def test_the_rest_of_an_answered_request_that_does_not_come(live: LiveServer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 3)
    connection = connect(live)
    connection.sendall(b"POST /nothing HTTP/1.1\r\nHost: t\r\nContent-Length: 100\r\n\r\n")
    assert connection.recv(65536).startswith(b"HTTP/1.1 404 ")
    connection.sendall(b"x")
    assert read_to_end(connection) == b""


def test_a_long_answer_is_not_cut_by_the_heads_time(live: LiveServer, pool: EchoPool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(protocol, "HEAD_SECONDS", 0.5)
    pool.hold = True
    connection = post(live, "/v1/chat/completions", CHAT)
    until(lambda: bool(pool.running))
    connection.settimeout(0.7)
    with pytest.raises(TimeoutError):
        connection.recv(1)
    connection.settimeout(20)
    pool.hold = False
    assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("head", ["Content-Length: 100", "Transfer-Encoding: chunked"])
def test_a_body_that_stops_coming(live: LiveServer, monkeypatch: pytest.MonkeyPatch, head: str):
    monkeypatch.setattr(body_limit, "STALLED_SECONDS", 0.05)
    connection = connect(live)
    connection.sendall(
        f"POST /tokenize HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\n{head}\r\n\r\n5\r\n{{".encode()
    )
    assert read_to_end(connection).startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize("behind", [1, 3])
def test_a_client_that_leaves_with_requests_waiting_behind(live: LiveServer, pool: EchoPool, behind: int):
    pool.hold_after = 1
    connection = connect(live)
    body = {**CHAT, "stream": True}
    connection.sendall(request("/v1/chat/completions", body) * (1 + behind))
    until(lambda: sum(pool.delivered.values()) == 1)
    connection.close()
    until(lambda: not pool.running)
    assert len(pool.submitted) == 1
    pool.hold_after = None
    answers(live)


def test_requests_ahead_of_their_answers_are_answered_in_order(live: LiveServer):
    connection = connect(live)
    prompts = ["a", "bc", "def"]
    data = b"".join(request("/tokenize", {"prompt": prompt}) for prompt in prompts)
    connection.sendall(data + request("/tokenize", {"prompt": "ghij"}, "Connection: close"))
    answer = read_to_end(connection)
    assert [answer.count(b'"count":%d,' % count) for count in (1, 2, 3, 4)] == [1, 1, 1, 1]


@pytest.mark.parametrize(
    "piece",
    [request("/tokenize", {"prompt": "x"}), request("/tokenize", {"prompt": "x" * 200_000})],
    ids=["many", "large"],
)
def test_too_much_ahead_of_the_answer(live: LiveServer, pool: EchoPool, piece: bytes):
    pool.hold_after = 1
    connection = post(live, "/v1/chat/completions", {**CHAT, "stream": True})
    until(lambda: sum(pool.delivered.values()) == 1)
    flood(connection, piece)
    until(lambda: not pool.running)


@pytest.mark.parametrize("split", [None, 100])
@pytest.mark.parametrize("protocol_name", ["h2c", "websocket"])
def test_an_offer_to_upgrade_is_passed_over(live: LiveServer, split: int | None, protocol_name: str):
    """As Java's HTTP client does with its first request: the body belongs to the request all the same."""
    connection = connect(live)
    headers = ["Connection: Upgrade, HTTP2-Settings, close", f"Upgrade: {protocol_name}", "HTTP2-Settings: AAEAAEAAAAI"]
    data = request("/tokenize", {"prompt": "four\r\nUpgrade: x"}, *headers)
    connection.sendall(data[:split])
    if split is not None:
        connection.sendall(data[split:])
    answer = read_to_end(connection)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b'"count":16,' in answer


def test_many_idle_connections_disturb_nobody(live: LiveServer):
    idle = [connect(live) for _ in range(300)]
    answers(live)
    for connection in idle:
        connection.close()


def test_listeners_accept_connections_that_notice_lost_clients():
    from services.frontend.http.server import _set_connection_options, bind

    with bind("127.0.0.1", 0) as listener:
        _set_connection_options(listener)
        with socket.create_connection(listener.getsockname()) as _, listener.accept()[0] as accepted:
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)


@pytest.mark.skipif(sys.platform != "linux", reason="TCP_USER_TIMEOUT is Linux's")
def test_a_client_that_takes_nothing_is_lost(monkeypatch: pytest.MonkeyPatch):
    from services.frontend.http import server

    monkeypatch.setitem(server._PROBE_OPTIONS, "TCP_USER_TIMEOUT", 500)
    with server.bind("127.0.0.1", 0) as listener:
        server._set_connection_options(listener)
        with socket.create_connection(listener.getsockname()) as _, listener.accept()[0] as accepted:
            accepted.settimeout(60)
            with pytest.raises(TimeoutError) as lost:
                accepted.sendall(b"x" * 50_000_000)
            assert lost.value.errno == errno.ETIMEDOUT


@pytest.mark.parametrize("answer_begins", [False, True])
def test_what_is_no_http_behind_a_request(live: LiveServer, pool: EchoPool, answer_begins: bool):
    """It ends the connection, and is never written into an answer that has begun."""
    pool.hold_after = 2 if answer_begins else 0
    connection = post(live, "/v1/chat/completions", {**CHAT, "stream": True})
    until(lambda: bool(pool.running))
    received = b""
    while answer_begins and received.count(b"data: ") < 2:
        received += connection.recv(65536)
    connection.sendall(b"garbage\r\n\r\n")
    received += read_to_end(connection)
    until(lambda: not pool.running)
    head, _, body = received.partition(b"\r\n\r\n")
    assert received.count(b"HTTP/1.1 ") == 1
    if answer_begins:
        assert head.startswith(b"HTTP/1.1 200 ")
    else:
        assert head.startswith(b"HTTP/1.1 400 ")
        assert "HTTP" in json.loads(body)["error"]["message"]


@pytest.mark.parametrize(
    "data", [b"garbage\r\n\r\n", b"GET / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n"]
)
def test_what_is_no_http(live: LiveServer, data: bytes):
    connection = connect(live)
    connection.sendall(request("/tokenize", {"prompt": "x"}))
    assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
    connection.sendall(data)
    head, _, body = read_to_end(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "data",
    [
        b"garbage " * 20_000,
        b"POST /tokenize HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\nExpect: 100-continue\r\n"
        b"Transfer-Encoding: chunked\r\n\r\ngarbage\r\n",
    ],
    ids=["longer than a head", "with an offer to wait"],
)
def test_nothing_is_written_behind_the_answer_to_what_is_no_http(
    live: LiveServer, data: bytes, caplog: pytest.LogCaptureFixture
):
    connection = connect(live)
    connection.sendall(data)
    answer = read_to_end(connection)
    answers(live)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1 ") == 1
    assert not [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]


def test_a_client_that_waits_to_be_told_to_go_on(live: LiveServer):
    connection = connect(live)
    head, _, body = request("/tokenize", {"prompt": "x"}, "Expect: 100-continue").partition(b"\r\n\r\n")
    connection.sendall(head + b"\r\n\r\n")
    assert connection.recv(65536) == b"HTTP/1.1 100 Continue\r\n\r\n"
    connection.sendall(body)
    assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("chunked", [False, True])
def test_a_client_that_sends_all_of_a_body_too_large_hears_why_it_was_refused(
    live: LiveServer, chunked: bool, monkeypatch: pytest.MonkeyPatch
):
    """As most clients do, it reads nothing before it has sent everything."""
    monkeypatch.setattr(protocol, "LINGER_SECONDS", 60)
    piece = b" " * 0x100000
    num_pieces = 12
    head = b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\n"
    head += b"Transfer-Encoding: chunked" if chunked else b"Content-Length: %d" % (num_pieces * len(piece))
    connection = connect(live)
    connection.sendall(head + b"\r\n\r\n")
    for _ in range(num_pieces):
        connection.sendall(b"100000\r\n" + piece + b"\r\n" if chunked else piece)
    assert read_to_end(connection).startswith(b"HTTP/1.1 413 ")


def test_a_client_that_sends_on_for_ever_after_a_refusal_is_cut_off(live: LiveServer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(protocol, "LINGER_BYTES", 200_000)
    connection = connect(live)
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: 9000000000\r\n\r\n")
    flood(connection, b" " * 10_000)


def test_a_client_that_stays_after_a_refusal_is_cut_off(live: LiveServer, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(protocol, "LINGER_SECONDS", 0.05)
    connection = connect(live)
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Length: 9000000000\r\n\r\n")
    assert read_to_end(connection).startswith(b"HTTP/1.1 413 ")
    flood(connection, b" " * 1000)
