"""Streams written without a task switch for each token: straight from the engine's message to the connection.

A task a stream would be woken for every token of it. Here a stream that has something new joins a list, and one
callback of the event loop writes all of them: what a step made, of all streams, leaves in one pass, and what several
steps made of one stream in one write. `sse` begins and ends the answers; `protocol` has the connections.
"""

import asyncio
import logging
from collections.abc import Callable

from services.frontend.http.choices import Choices
from services.frontend.http.protocol import ResponseBody
from services.frontend.output.collector import Delta

logger = logging.getLogger(__name__)

# Streams written before the event loop looks at its sockets again: about a millisecond.
_STREAMS_PER_PASS = 100


class StreamPump:
    """The streams of one event loop that have something to write."""

    def __init__(self) -> None:
        self._ready: list[StreamWriter] = []
        self._pass_is_due = False

    def add(self, writer: "StreamWriter") -> None:
        """Have it write in the next pass. A writer adds itself once until it has written."""
        self._ready.append(writer)
        if not self._pass_is_due:
            self._pass_is_due = True
            asyncio.get_running_loop().call_soon(self._run_pass)

    def _run_pass(self) -> None:
        ready = self._ready
        self._ready = ready[_STREAMS_PER_PASS:]
        self._pass_is_due = bool(self._ready)
        if self._pass_is_due:
            asyncio.get_running_loop().call_soon(self._run_pass)
        # Not in turns: making chunks and sending them would drive each other's code and data out of the caches.
        pieces = [(writer, writer.take_unread()) for writer in ready[:_STREAMS_PER_PASS]]
        for writer, frames in pieces:
            if frames:
                writer.write(frames)


class StreamWriter:
    """Writes one stream until its choices are done. `frames` makes the bytes of what is new; `keep_alive` is written
    whenever nothing else was for `keep_alive_seconds`."""

    def __init__(
        self,
        pump: StreamPump,
        body: ResponseBody,
        choices: Choices,
        frames: Callable[[list[tuple[int, Delta]]], bytes],
        keep_alive: bytes,
        keep_alive_seconds: float | None,
    ) -> None:
        self._pump = pump
        self._body = body
        self._choices = choices
        self._frames = frames
        self._keep_alive = keep_alive
        self._keep_alive_seconds = keep_alive_seconds
        self._loop = asyncio.get_running_loop()
        self._end: asyncio.Future[bytes] = self._loop.create_future()
        self._timer: asyncio.TimerHandle | None = None
        self._written_at = self._loop.time()
        self._waits_for_client = False

    async def run(self) -> bytes:
        """Write what comes; return the last of it, which ends the answer, unwritten."""
        self._body.on_writable = self._client_has_read
        self._watch_silence()
        try:
            self._choices.notify(self._have_unread)
            return await self._end
        finally:
            self._choices.notify(None)
            self._body.on_writable = None
            if self._timer is not None:
                self._timer.cancel()

    def take_unread(self) -> bytes:
        """What the choices have made; nothing while the client reads slowly, so that it is merged."""
        if self._end.done():
            return b""
        if not self._body.is_writable:
            self._waits_for_client = True
            return b""
        self._waits_for_client = False
        try:
            frames = self._frames(self._choices.take(self._have_unread))
        except Exception as error:
            # This stream's trouble is not the others'.
            self._end.set_exception(error)
            return b""
        if self._choices.done:
            self._end.set_result(frames)
            return b""
        return frames

    def write(self, frames: bytes) -> None:
        """Send what was taken."""
        try:
            self._body.write(frames)
            self._written_at = self._loop.time()
        except Exception as error:
            if not self._end.done():
                self._end.set_exception(error)

    def _have_unread(self) -> None:
        self._pump.add(self)

    def _client_has_read(self) -> None:
        if self._waits_for_client:
            self._pump.add(self)

    def _watch_silence(self) -> None:
        seconds = self._keep_alive_seconds
        if seconds is None or self._end.done():
            return
        silence = self._loop.time() - self._written_at
        if silence < seconds:
            seconds -= silence
        elif self._body.is_writable and not self._waits_for_client:
            self._body.write(self._keep_alive)
            self._written_at += silence
        self._timer = self._loop.call_later(seconds, self._watch_silence)
