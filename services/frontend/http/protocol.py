"""HTTP/1.1 on one connection: uvicorn's protocol, with the limits and the care that it leaves to a proxy.

server.py hands it to uvicorn. What is larger or slower than any client's request ends the connection.
"""

import asyncio
import re
import weakref
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from services.frontend.http.errors import ApiError
from services.frontend.http.json_bytes import json_bytes

# Request line and headers together. Others take 8 to 64 KiB.
MAX_HEAD_BYTES = 65_536
# From the connection, or the first byte of a request, to the end of its headers.
HEAD_SECONDS = 75.0
# Requests sent ahead of the answers on one connection, and the bytes of their bodies.
MAX_PIPELINED = 8
MAX_PIPELINED_BODY_BYTES = 65_536
# What is still read, and thrown away, of a request that was answered before its end: a connection that is closed
# over bytes which nobody has read is reset, and most clients then see the reset and not the answer.
LINGER_BYTES = 32 * 1024 * 1024
LINGER_SECONDS = 30.0  # a body just over the limit comes in it at 3 Mbit/s

# Where an application finds its answer's ResponseBody in the ASGI scope.
RESPONSE_BODY = "tandem.response_body"

_INTERIM = b"HTTP/1.1 100 "
_UPGRADE = re.compile(rb"(\r\n)upgrade(?=:)", re.IGNORECASE)


class AnswerTransport:
    """The connection as one answer writes to it: its head waits for the beginning of the body, to leave with it in one
    system call, but no longer than the event loop's present turn takes."""

    __slots__ = ("_begun", "_head", "_loop", "_transport")

    def __init__(self, transport: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport  # of a Protocol, which is asked of it: nothing here may refer to it
        self._loop = loop
        self._head = b""
        self._begun = False

    def write(self, data: bytes) -> None:
        if not self._begun and data.startswith(_INTERIM):
            self._transport.write(data)  # "go on, send the body": no answer's head
        elif not self._begun:
            self._begun = True
            self._head = data
            self._loop.call_soon(self._flush)
        elif self._head:
            data, self._head = self._head + data, b""
            self._transport.write(data)
        else:
            self._transport.write(data)

    def close(self) -> None:
        self._flush()
        if not self._transport.is_closing():
            self._transport.get_protocol().close_after_answer()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def _flush(self) -> None:
        if self._head and not self._transport.is_closing():
            self._transport.write(self._head)
        self._head = b""


class ResponseBody:
    """The body of one answer, for pieces that are written from outside its task: between the start and the end of the
    answer, which go through ASGI's `send`. `on_writable` is called when the client has read enough of what it had."""

    __slots__ = ("_cycle", "_flow", "_transport", "on_writable")

    def __init__(self, cycle: Any) -> None:
        self.on_writable: Callable[[], None] | None = None
        self._cycle = weakref.ref(cycle)  # whose scope refers to this: neither may wait for the garbage collector
        self._flow = cycle.flow
        self._transport = cycle.transport

    @property
    def is_chunked(self) -> bool:
        """Whether the answer has begun, in a form that `write` can continue."""
        cycle = self._cycle()
        return cycle is not None and bool(cycle.response_started and cycle.chunked_encoding)

    @property
    def is_writable(self) -> bool:
        """False while the client reads too slowly: what is written all the same waits in memory."""
        return not self._flow.write_paused

    def write(self, data: bytes) -> None:
        cycle = self._cycle()
        if cycle is not None and not cycle.disconnected:
            self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))


class Protocol(HttpToolsProtocol):
    """One connection. The parser calls the `on_` methods while it is fed."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._in_head = True
        self._heads = 0
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._lingering_bytes: int | None = None  # read since the last answer, after which nothing is answered
        self._running: Any = None  # the request that is being answered
        self._body: ResponseBody | None = None  # of its answer

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        # uvicorn tells the last request only. One that is answered while others wait behind it would go on for nobody.
        self._give_up_requests()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._lingering_bytes is not None:
            self._lingering_bytes += len(data)
            if self._lingering_bytes > LINGER_BYTES:
                self.transport.close()
            return
        in_head, heads = self._in_head, self._heads
        if in_head:
            self._expect_head()
            data = _without_upgrade(data)
        super().data_received(data)
        if in_head and heads == self._heads and self._lingering_bytes is None:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(ApiError(431, f"the request's headers are over this server's limit of {MAX_HEAD_BYTES}"))

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._heads += 1
        self._head_bytes = 0
        self._stop_head_timer()
        super().on_headers_complete()
        if self.pipeline:
            # uvicorn reads no further, and would not see the client leave.
            self.flow.resume_reading()
            if len(self.pipeline) > MAX_PIPELINED:
                self.transport.close()

    def on_body(self, body: bytes) -> None:
        super().on_body(body)
        if self.pipeline:
            self.flow.resume_reading()
            if len(self.cycle.body) > MAX_PIPELINED_BODY_BYTES:
                self.transport.close()

    def on_message_complete(self) -> None:
        self._in_head = True
        super().on_message_complete()

    def on_response_complete(self) -> None:
        running = self._running
        super().on_response_complete()
        if running.more_body:
            # Answered before its end, which is waited for no longer than for the next request's head.
            self._expect_head()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._running = cycle
        # No body follows the head of an answer to HEAD.
        if cycle.scope["method"] != "HEAD":
            cycle.transport = AnswerTransport(cycle.transport, self.loop)
        self._body = cycle.scope[RESPONSE_BODY] = ResponseBody(cycle)
        super()._start_asgi_task(cycle, app)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._body is not None and self._body.on_writable is not None:
            self._body.on_writable()

    def _expect_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_SECONDS, self._head_is_late)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        self._head_timer = None
        running = self._running
        if running is None or ((self._in_head or running.more_body) and running.response_complete):
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """uvicorn's, for what its parser does not take."""
        self._refuse(ApiError(400, "the request is not valid HTTP/1.1"))

    def _refuse(self, error: ApiError) -> None:
        """End the connection: with this answer, unless another has begun."""
        running = self._running
        if running is not None and running.response_started and not running.response_complete:
            self.transport.close()
        elif not self.transport.is_closing():
            body = json_bytes(error.body())
            self.transport.write(
                b"HTTP/1.1 %d %b\r\nconnection: close\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
                % (error.status, HTTPStatus(error.status).phrase.encode(), len(body), body)
            )
            self._give_up_requests()
            self._linger()

    def close_after_answer(self) -> None:
        """Close, or first let the client finish a request that was answered before its end."""
        if self._running.more_body:
            self._linger()
        else:
            self.transport.close()

    def shutdown(self) -> None:
        """The server stops, which waits for answers, and not for requests that have theirs."""
        if self._lingering_bytes is None:
            super().shutdown()
        else:
            self.transport.close()

    def _linger(self) -> None:
        """Say that nothing more comes, and close when the client has seen it, or takes too long."""
        if not self.transport.is_closing():
            self._lingering_bytes = 0
            self.transport.write_eof()
            self.flow.resume_reading()
            self.loop.call_later(LINGER_SECONDS, self.transport.close)

    def _give_up_requests(self) -> None:
        """Nobody hears their answers any more."""
        for cycle in (self._running, *(waiting for waiting, _ in self.pipeline)):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.waiting_for_100_continue = False
                cycle.message_event.set()


def _without_upgrade(data: bytes) -> bytes:
    """The head with its Upgrade header renamed. This server switches to no other protocol, so it has to answer as if
    there were none; httptools would take the body for that of the other protocol. Java's client asks for HTTP/2 so.
    """
    end = data.find(b"\r\n\r\n")
    head = data if end < 0 else data[: end + 2]
    if _UPGRADE.search(head) is None:
        return data
    return _UPGRADE.sub(rb"\1x-upgrade", head) + data[len(head) :]
