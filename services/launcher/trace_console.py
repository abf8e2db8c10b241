"""`tandem serve --trace console`: collects all children's spans, by OTLP on loopback, and prints each trace whole.

Frontends and engines are processes of their own, each with a part of every trace; here the parts come together.
`trace_tree` draws them.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from services.launcher.trace_tree import TreeSpan, render_trace

MAX_TRACES = 1000  # under way; the oldest is forgotten
MAX_SPANS = 1000  # of one trace
_MAX_BODY_BYTES = 64 * 1024 * 1024
_EXPORT_MILLISECONDS = 100
# A request's end comes from its frontend; what its engines have still to say comes within two of their exports.
_QUIET_SECONDS = 0.5


@contextmanager
def trace_console(show: Callable[[str], None] | None = None) -> Iterator[dict[str, str]]:
    """Collects traces while it lasts, and has `show` print them. Yields the variables for the children."""
    color = sys.stdout.isatty()
    traces = _Traces(show or _print, color)

    class Handler(_Handler):
        take = staticmethod(traces.take)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.1,), name="traces", daemon=True).start()
        ended = threading.Event()
        printing = threading.Thread(target=_print_finished, args=(traces, ended), name="trace tree", daemon=True)
        printing.start()
        try:
            yield {
                "OTEL_SDK_DISABLED": "false",
                "OTEL_TRACES_EXPORTER": "otlp",
                "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
                "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"http://127.0.0.1:{server.server_address[1]}/v1/traces",
                "OTEL_BSP_SCHEDULE_DELAY": str(_EXPORT_MILLISECONDS),
                "NO_PROXY": ",".join(filter(None, [os.environ.get("NO_PROXY"), "127.0.0.1"])),
            }
        finally:
            server.shutdown()
            ended.set()
            printing.join(5)


@dataclass(slots=True)
class _Trace:
    spans: list[TreeSpan] = field(default_factory=list)
    is_answered: bool = False  # the HTTP span, which ends last, is there
    heard: float = 0.0


class _Traces:
    """Those that are not printed yet."""

    def __init__(self, show: Callable[[str], None], color: bool) -> None:
        self._show = show
        self._color = color
        self._traces: dict[bytes, _Trace] = {}
        self._lock = threading.Lock()

    def take(self, request: ExportTraceServiceRequest) -> None:
        with self._lock:
            for of_resource in request.resource_spans:
                for of_scope in of_resource.scope_spans:
                    for span in of_scope.spans:
                        self._take(span)

    def _take(self, span: Span) -> None:
        trace = self._traces.get(span.trace_id)
        if trace is None:
            trace = self._traces[span.trace_id] = _Trace()
            if len(self._traces) > MAX_TRACES:
                del self._traces[next(iter(self._traces))]
        trace.heard = time.monotonic()
        trace.is_answered = trace.is_answered or span.kind == Span.SPAN_KIND_SERVER
        if len(trace.spans) < MAX_SPANS:
            trace.spans.append(_tree_span(span))

    def show_finished(self, *, all_of_them: bool = False) -> None:
        now = time.monotonic()
        with self._lock:
            finished = [
                trace_id
                for trace_id, trace in self._traces.items()
                if trace.is_answered and (all_of_them or now - trace.heard >= _QUIET_SECONDS)
            ]
            texts = [
                render_trace(trace_id.hex(), self._traces.pop(trace_id).spans, color=self._color)
                for trace_id in finished
            ]
        for text in texts:
            self._show(text)


def _print_finished(traces: _Traces, ended: threading.Event) -> None:
    while not ended.wait(0.1):
        traces.show_finished()
    traces.show_finished(all_of_them=True)


def _print(text: str) -> None:
    print(f"\n{text}", flush=True)


class _Handler(BaseHTTPRequestHandler):
    take: Callable[[ExportTraceServiceRequest], None]
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        status = 413
        if 0 <= length <= _MAX_BODY_BYTES:
            try:
                self.take(ExportTraceServiceRequest.FromString(self.rfile.read(length)))
                status = 200
            except DecodeError:
                status = 400
        self.send_response(status)
        self.send_header("Content-Type", "application/x-protobuf")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


def _tree_span(span: Span) -> TreeSpan:
    return TreeSpan(
        name=span.name,
        span_id=span.span_id,
        parent_id=span.parent_span_id,
        start=span.start_time_unix_nano,
        end=span.end_time_unix_nano,
        attributes={pair.key: _value(pair.value) for pair in span.attributes},
        events=[event.name for event in span.events],
        error=(span.status.message or "failed") if span.status.code == Status.STATUS_CODE_ERROR else None,
    )


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind) if kind else None
