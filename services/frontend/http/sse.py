"""A stream of chunks as server-sent events, written straight to ASGI.

The status line waits for the first token, so that a request which an engine refuses still gets its own status;
after it an error is a chunk, and [DONE] always ends the stream.
"""

import logging

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.frontend.generation import GenerationError
from services.frontend.http.answer import DONE, Chunks, error_chunk
from services.frontend.http.choices import Choices
from services.frontend.http.disconnect import while_connected
from services.frontend.http.errors import ClientDisconnected, api_error
from services.frontend.http.state import FrontendState
from services.frontend.output.collector import Delta

logger = logging.getLogger(__name__)

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
        self._choices = choices
        self._chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        streams = self._state.metrics.streams_in_flight
        streams.inc()
        try:
            self._state.begin(self._choices)
            await while_connected(receive, self._run(scope, receive, send))
        except GenerationError as error:
            await api_error(error).response()(scope, receive, send)
        except ClientDisconnected:
            scope[DISCONNECTED] = True
        finally:
            self._state.end(self._choices)
            streams.dec()

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        deltas = await self._choices.next()
        error = self._choices.error
        if error is not None and not any(_has_output(delta) for _, delta in deltas):
            raise error
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        more = True
        while more:
            frames = self._frames(deltas)
            more = not self._choices.done
            if not more:
                frames += DONE
            if frames:
                # Waits while the client reads slowly; meanwhile the collector merges what comes.
                await send({"type": "http.response.body", "body": frames, "more_body": more})
            if more:
                deltas = await self._choices.next()

    def _frames(self, deltas: list[tuple[int, Delta]]) -> bytes:
        try:
            frames = self._chunks.write(deltas)
            if self._choices.error is not None:
                return frames + self._chunks.fail() + error_chunk(api_error(self._choices.error))
            return frames + self._chunks.end() if self._choices.done else frames
        except Exception as error:
            logger.exception("Cannot write a chunk; this stream ends with an error, others go on")
            self._choices.error = GenerationError("the answer could not be written")
            self._choices.close()
            return self._chunks.fail() + error_chunk(api_error(error))


def _has_output(delta: Delta) -> bool:
    return bool(delta.token_ids) or delta.finish_reason is not None
