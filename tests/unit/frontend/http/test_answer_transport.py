"""An answer's way onto its connection, without a socket: its head leaves with its body, and before the end."""

import asyncio
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from services.frontend.http import protocol


class Written:
    """A transport that keeps what is written to it."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.closed = False

    def write(self, data: bytes) -> None:
        assert not self.closed
        self.writes.append(data)

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def get_protocol(self) -> "Written":
        return self

    def close_after_answer(self) -> None:
        self.close()


def test_an_answers_head_leaves_with_the_beginning_of_its_body() -> None:
    async def main() -> None:
        written = Written()
        answer = protocol.AnswerTransport(written, asyncio.get_running_loop())
        for data in (b"head ", b"body", b"more"):
            answer.write(data)
        assert written.writes == [b"head body", b"more"]
        await asyncio.sleep(0)
        assert written.writes == [b"head body", b"more"]

    asyncio.run(main())


def test_an_answers_head_waits_for_no_body_that_is_not_there() -> None:
    async def main() -> None:
        written = Written()
        answer = protocol.AnswerTransport(written, asyncio.get_running_loop())
        answer.write(b"head")
        assert written.writes == []
        await asyncio.sleep(0)
        assert written.writes == [b"head"]
        answer.write(b"body")
        assert written.writes == [b"head", b"body"]

    asyncio.run(main())


def test_an_answers_head_leaves_before_its_connection_closes() -> None:
    async def main() -> None:
        written = Written()
        answer = protocol.AnswerTransport(written, asyncio.get_running_loop())
        answer.write(b"head")
        answer.close()
        assert (written.writes, written.closed) == ([b"head"], True)
        await asyncio.sleep(0)
        assert written.writes == [b"head"]

    asyncio.run(main())


class Connected(Written):
    """A transport that a Protocol serves."""

    protocol: protocol.Protocol

    def get_protocol(self) -> Any:
        return self.protocol

    def get_extra_info(self, name: str) -> None:
        return None

    def resume_reading(self) -> None: ...

    def pause_reading(self) -> None: ...

    def write_eof(self) -> None: ...


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_an_answer_has_left_when_its_connection_is_closed_in_the_same_turn(method: str) -> None:
    async def main() -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            headers = [(b"content-length", b"4")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": b"body"})
            connection.shutdown()  # as the server does when it stops

        config = uvicorn.Config(app, log_config=None, access_log=False)
        written, state = Connected(), ServerState()
        connection = protocol.Protocol(config, state, {})
        written.protocol = connection
        connection.connection_made(written)  # type: ignore[arg-type]
        connection.data_received(f"{method} / HTTP/1.1\r\nHost: t\r\n\r\n".encode())
        await asyncio.gather(*state.tasks)
        assert written.closed
        answer = b"".join(written.writes)
        assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
        assert answer.endswith(b"\r\n\r\n" if method == "HEAD" else b"\r\n\r\nbody")

    asyncio.run(main())


def test_a_server_that_stops_waits_for_no_request_that_it_has_refused() -> None:
    async def main() -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            await receive()

        state, written = ServerState(), Connected()
        connection = protocol.Protocol(uvicorn.Config(app, log_config=None, access_log=False), state, {})
        written.protocol = connection
        connection.connection_made(written)  # type: ignore[arg-type]
        connection.data_received(b"POST / HTTP/1.1\r\nHost: t\r\nTransfer-Encoding: chunked\r\n\r\ngarbage\r\n")
        await asyncio.gather(*state.tasks)
        assert b"".join(written.writes).startswith(b"HTTP/1.1 400 ")
        assert not written.closed
        connection.shutdown()
        assert written.closed

    asyncio.run(main())
