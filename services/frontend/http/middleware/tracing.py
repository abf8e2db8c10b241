"""The layer outside all others: begins each request's trace, or continues the client's, and ends it with the answer.

An answer that is streamed ends with its last byte, or when its client is gone; so does its trace.
"""

import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.frontend.http.errors import CLIENT_CLOSED_REQUEST
from services.frontend.http.sse import DISCONNECTED
from services.frontend.settings import FrontendSettings
from services.frontend.tracing import TRACE, RequestTrace, client_context, set_current_trace
from shared.tracing import Attributes, TraceContext, Tracing, new_span_id, new_trace_id

_UNTRACED_PATHS = ("/health", "/metrics")
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"})
# While everything fails, a few of the failures are enough.
MAX_KEPT_PER_SECOND = 10


class RequestTracing:
    """Exports the spans of requests that are sampled, and of those that fail or are slow, if the settings keep them."""

    def __init__(self, app: ASGIApp, tracing: Tracing, settings: FrontendSettings) -> None:
        self._app = app
        self._tracing = tracing
        self._keeps_errors = settings.trace_errors
        self._slow_ns = None if settings.trace_slower_than is None else int(settings.trace_slower_than * 1e9)
        self._content = settings.trace_content
        self._second = 0
        self._kept_in_second = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith(_UNTRACED_PATHS):
            await self._app(scope, receive, send)
            return
        trace = scope[TRACE] = self._begin(scope)
        set_current_trace(trace)  # of the request's own task, whose context ends with it
        if not trace.recording:
            await self._app(scope, receive, send)
            return
        start: Message = {}
        failure: BaseException | None = None

        async def send_noting_start(message: Message) -> None:
            nonlocal start
            if message["type"] == "http.response.start":
                start = message
            await send(message)

        try:
            await self._app(scope, receive, send_noting_start)
        except BaseException as error:
            failure = error
            raise
        finally:
            self._end(trace, scope, start, failure)
            failure = None  # its traceback refers to this frame
            trace.forget()

    def _begin(self, scope: Scope) -> RequestTrace:
        parent = client_context(scope)
        trace_id = new_trace_id() if parent is None else parent.trace_id
        sampled = self._tracing.samples(trace_id, parent)
        context = TraceContext(trace_id, new_span_id(), sampled, "" if parent is None else parent.state)
        recording = sampled or self._keeps_errors or self._slow_ns is not None
        return RequestTrace(context, parent, recording=recording, content=self._content)

    def _end(self, trace: RequestTrace, scope: Scope, start: Message, failure: BaseException | None) -> None:
        status: int = start.get("status", CLIENT_CLOSED_REQUEST if failure is None else 500)
        left = bool(scope.get(DISCONNECTED)) or status == CLIENT_CLOSED_REQUEST
        error: str | None = None
        kind = ""
        if left:
            error, kind = "the client left before the end of its answer", "client_disconnected"
        elif failure is not None:
            error, kind = f"{type(failure).__name__} cut the answer off", type(failure).__name__
        elif status >= 500 or trace.error_status >= 500:
            error, kind = trace.error or f"answered with status {status}", str(trace.error_status or status)
        if not trace.sampled and not self._keeps(trace, failed=error is not None and not left):
            return
        attributes = _attributes(scope, status, start)
        if error is not None:
            attributes["error.type"] = kind
        if left:
            attributes["tandem.disconnected"] = True
        route = attributes.get("http.route")
        method = attributes["http.request.method"]
        self._tracing.export(trace.spans(f"{method} {route}" if route else f"{method}", attributes, error))

    def _keeps(self, trace: RequestTrace, *, failed: bool) -> bool:
        """Whether a request that was not sampled is kept all the same: the tail rule."""
        now = time.time_ns()
        slow = self._slow_ns is not None and now - trace.started >= self._slow_ns
        if not slow and not (failed and self._keeps_errors):
            return False
        second = now // 1_000_000_000
        if second != self._second:
            self._second, self._kept_in_second = second, 0
        self._kept_in_second += 1
        return self._kept_in_second <= MAX_KEPT_PER_SECOND


def _attributes(scope: Scope, status: int, start: Message) -> Attributes:
    """OpenTelemetry's for HTTP servers. Without the query, which may hold what is nobody's business."""
    method = scope["method"]
    attributes: Attributes = {
        "http.request.method": method if method in _METHODS else "_OTHER",
        "http.response.status_code": status,
        "url.path": scope["path"][:200],
        "url.scheme": scope.get("scheme", "http"),
        "network.protocol.version": scope.get("http_version", "1.1"),
    }
    route = getattr(scope.get("route"), "path", None)
    if route is not None:
        attributes["http.route"] = route
    if scope.get("client"):
        attributes["client.address"] = scope["client"][0]
    for name, value in scope["headers"]:
        if name == b"user-agent":
            attributes["user_agent.original"] = value[:200].decode("latin-1")
    for name, value in start.get("headers", ()):
        if name == b"x-request-id":
            attributes["tandem.request.id"] = value.decode("latin-1")
    return attributes
