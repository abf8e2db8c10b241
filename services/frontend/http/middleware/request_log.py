"""The outermost layer: a request id, one line in the access log, the metrics, and the answer to what nobody caught."""

import logging
import re
import secrets
import time
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.frontend.http.errors import CLIENT_CLOSED_REQUEST, ERROR_REASON, api_error
from services.frontend.http.sse import DISCONNECTED
from services.frontend.metrics.frontend_metrics import FrontendMetrics
from services.frontend.metrics.request_record import RequestRecord, begin_record
from services.frontend.metrics.requests import Outcome
from services.frontend.tracing import trace_of

logger = logging.getLogger(__name__)
access_logger = logging.getLogger("tandem.access")

_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:\-]{1,128}")
_PROBES = ("/health", "/metrics")


class RequestLog:
    """A client's X-Request-Id is taken over where it is a harmless name; the answer carries it."""

    def __init__(self, app: ASGIApp, metrics: FrontendMetrics) -> None:
        self._app = app
        self._metrics = metrics.requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = begin_record(scope)
        request_id = _request_id(scope)
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
            await send(message)

        self._metrics.in_flight.inc()
        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:
            logger.exception("Request %s failed", request_id.decode())
            if status:
                scope[ERROR_REASON] = "failed"
                raise  # the server cuts the connection: the answer has begun and cannot be ended properly
            await api_error(error).response()(scope, receive, send_with_id)
        finally:
            self._metrics.in_flight.dec()
            self._end(scope, record, status, request_id)

    def _end(self, scope: Scope, record: RequestRecord, status: int, request_id: bytes) -> None:
        trace, is_sampled = trace_of(scope)
        outcome = Outcome(
            # The route's pattern, since a path is the client's to choose and each would be a series of its own.
            route=getattr(scope.get("route"), "path", "other"),
            status=status or CLIENT_CLOSED_REQUEST,
            seconds=time.perf_counter() - record.started,
            error=_error(scope, record),
            left=_left(scope, status),
            trace_id=trace if is_sampled else "",
        )
        self._metrics.ended(outcome, record.generated, record.started)
        level = logging.DEBUG if scope["path"].startswith(_PROBES) and outcome.status < 400 else logging.INFO
        if not access_logger.isEnabledFor(level):
            return
        # The path is the client's: no line break of it may look like a line of ours.
        path = scope["path"][:200].encode("unicode_escape").decode()
        fields = _fields(scope, outcome, record) | {"request_id": request_id.decode(), "trace_id": trace}
        access_logger.log(
            level,
            "%s %s %d",
            scope["method"],
            path,
            outcome.status,
            extra={name: value for name, value in fields.items() if value != ""},
        )


def _fields(scope: Scope, outcome: Outcome, record: RequestRecord) -> dict[str, Any]:
    """What the line says beyond its message; what is empty is left out. Times in seconds."""
    client = scope.get("client")
    fields: dict[str, Any] = {
        "duration": round(outcome.seconds, 6),
        "client": client[0] if client else "",
        "error": outcome.error,
        "client_left": outcome.left,
    }
    generated = record.generated
    if generated is not None:
        first = generated.first_output_at
        fields |= {
            "model": generated.model,
            "prompt_tokens": generated.usage.prompt_tokens,
            "cached_tokens": generated.usage.cached_tokens,
            "completion_tokens": generated.completion_tokens,
            "time_to_first_token": round(first - record.started, 6) if first else "",
            "finish_reasons": generated.finish_reasons,
        }
    return fields


def _error(scope: Scope, record: RequestRecord) -> str:
    """Why the request failed, in one of the metrics' words; empty where it did not."""
    reason: str = scope.get(ERROR_REASON, "")
    if not reason and record.generated is not None and record.generated.choices.error is not None:
        return record.generated.choices.error.reason
    return reason


def _left(scope: Scope, status: int) -> str:
    if scope.get(DISCONNECTED) and status:
        return "streaming"
    return "waiting" if status in (0, CLIENT_CLOSED_REQUEST) else ""


def _request_id(scope: Scope) -> bytes:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            return value
    return secrets.token_hex(16).encode()
