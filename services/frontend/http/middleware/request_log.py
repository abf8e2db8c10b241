"""The outermost layer: a request id, one line in the access log, the metrics, and the answer to what nobody caught."""

import logging
import re
import secrets
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.frontend.http.errors import CLIENT_CLOSED_REQUEST, api_error
from services.frontend.http.metrics import Metrics
from services.frontend.http.sse import DISCONNECTED

logger = logging.getLogger(__name__)
access_logger = logging.getLogger("tandem.access")

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:\-]{1,128}")
_PROBES = ("/health", "/metrics")


class RequestLog:
    """A client's X-Request-Id is taken over where it is a harmless name; the answer carries it."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        request_id = _request_id(scope)
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
            await send(message)

        self._metrics.requests_in_flight.inc()
        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            logger.exception("Request %s failed", request_id.decode())
            if status:
                raise  # the server cuts the connection: the answer has begun and cannot be ended properly
            await api_error(error).response()(scope, receive, send_with_id)
        finally:
            self._metrics.requests_in_flight.dec()
            self._record(scope, status or CLIENT_CLOSED_REQUEST, request_id, time.perf_counter() - started)

    def _record(self, scope: Scope, status: int, request_id: bytes, seconds: float) -> None:
        # The route's pattern, since a path is the client's to choose and each would be a series of its own.
        route = getattr(scope.get("route"), "path", "other")
        self._metrics.requests.labels(route, str(status)).inc()
        left = ""
        if scope.get(DISCONNECTED):
            self._metrics.streams_abandoned.inc()
            left = " client left"
        level = logging.DEBUG if scope["path"].startswith(_PROBES) and status < 400 else logging.INFO
        client = scope.get("client")
        access_logger.log(
            level,
            "%s %s %s %d %.3fs %s%s",
            client[0] if client else "-",
            scope["method"],
            # The path is the client's: no line break of it may look like a line of ours.
            scope["path"][:200].encode("unicode_escape").decode(),
            status,
            seconds,
            request_id.decode(),
            left,
        )


def _request_id(scope: Scope) -> bytes:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            return value
    return secrets.token_hex(16).encode()
