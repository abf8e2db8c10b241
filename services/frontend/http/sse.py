"""A stream of chunks as server-sent events. `stream_writer` writes what is between its beginning and its end.

The status line waits for the first token, so that a request which an engine refuses still gets its own status, but
no longer than `stream_keep_alive`: then, and whenever so much time passes without a chunk, a comment is sent, for
proxies cut what they hear nothing of (nginx and most load balancers after a minute). After the status line an error is
a chunk, and [DONE] always ends the stream.
"""

import asyncio
import logging

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from services.frontend.generation import GenerationError
from services.frontend.http.answer import DONE, Chunks, error_chunk
from services.frontend.http.choices import Choices
from services.frontend.http.disconnect import while_connected
from services.frontend.http.errors import ClientDisconnected, api_error
from services.frontend.http.protocol import RESPONSE_BODY, ResponseBody
from services.frontend.http.state import FrontendState
from services.frontend.http.stream_writer import StreamWriter
from services.frontend.output.collector import Delta

logger = logging.getLogger(__name__)

# SSE's comments begin with a colon; clients pass over them.
_KEEP_ALIVE = b": waiting\n\n"

# Set in the ASGI scope for the access log: the client left in the middle of the stream.
DISCONNECTED = "tandem.disconnected"


class EventStream(Response):
    """Runs `choices` and sends what `chunks` makes of them, until they end or the client leaves."""

    media_type = "text/event-stream"

    def __init__(self, state: FrontendState, choices: Choices, chunks: Chunks) -> None:
        # As Starlette's StreamingResponse, and unlike Response, without a body and its length.
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._state = state
        self._keep_alive = state.settings.stream_keep_alive or None
        self._choices = choices
        self._chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        streams = self._state.metrics.streams_in_flight
        streams.inc()
        try:
            await self._state.begin(self._choices)
            await while_connected(receive, self._run(scope, receive, send))
        except GenerationError as error:
            await api_error(error).response()(scope, receive, send)
        except ClientDisconnected:
            scope[DISCONNECTED] = True
        finally:
            self._state.end(self._choices)
            streams.dec()

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        start: Message = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        deltas = await self._next()
        if deltas is None:
            await send(start)
            deltas = await self._next_keeping_alive(send)
        else:
            error = self._choices.error
            if error is not None and not any(_has_output(delta) for _, delta in deltas):
                raise error
            await send(start)
        while True:
            frames = self._frames(deltas)
            more = not self._choices.done
            if frames:
                # Waits while the client reads slowly; meanwhile the collector merges what comes.
                await send({"type": "http.response.body", "body": frames, "more_body": more})
            if not more:
                return
            body: ResponseBody | None = scope.get(RESPONSE_BODY)
            if body is not None and body.is_chunked:
                break
            # Another server than ours.
            deltas = await self._next()
            if deltas is None:
                deltas = await self._next_keeping_alive(send)
        writer = StreamWriter(self._state.pump, body, self._choices, self._frames, _KEEP_ALIVE, self._keep_alive)
        await send({"type": "http.response.body", "body": await writer.run(), "more_body": False})

    async def _next(self) -> list[tuple[int, Delta]] | None:
        """What is new, or None where nothing was for so long that the client should hear of it."""
        try:
            async with asyncio.timeout(self._keep_alive):
                return await self._choices.next()
        except TimeoutError:
            return None

    async def _next_keeping_alive(self, send: Send) -> list[tuple[int, Delta]]:
        deltas = None
        while deltas is None:
            await send({"type": "http.response.body", "body": _KEEP_ALIVE, "more_body": True})
            deltas = await self._next()
        return deltas

    def _frames(self, deltas: list[tuple[int, Delta]]) -> bytes:
        try:
            frames = self._chunks.write(deltas)
            if self._choices.error is not None:
                return frames + self._chunks.fail() + error_chunk(api_error(self._choices.error)) + DONE
            return frames + self._chunks.end() + DONE if self._choices.done else frames
        except Exception as error:
            logger.exception("Cannot write a chunk; this stream ends with an error, others go on")
            self._choices.error = GenerationError("the answer could not be written")
            self._choices.close()
            return self._chunks.fail() + error_chunk(api_error(error)) + DONE


def _has_output(delta: Delta) -> bool:
    return delta.error is None and (delta.completion_tokens > 0 or delta.finish_reason is not None)
