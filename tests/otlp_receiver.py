"""Receivers of OTLP on loopback, over HTTP and over gRPC, that keep every span for a test to look at."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status


@dataclass
class ReceivedSpan:
    """Ids in hex, times in Unix nanoseconds."""

    name: str
    kind: str
    trace_id: str
    span_id: str
    parent_id: str
    start: int
    end: int
    attributes: dict[str, Any]
    events: list[tuple[str, int, dict[str, Any]]]
    is_error: bool
    status: str
    resource: dict[str, Any]
    state: str


class OtlpReceiver:
    """What was received, by either way. `headers` are the last request's."""

    def __init__(self) -> None:
        self.port = 0
        self.headers: dict[str, str] = {}
        self.num_requests = 0
        self._spans: list[ReceivedSpan] = []
        self._lock = threading.Lock()

    @property
    def spans(self) -> list[ReceivedSpan]:
        with self._lock:
            return list(self._spans)

    def trace(self, trace_id: str) -> list[ReceivedSpan]:
        """One trace's spans, by their start."""
        return sorted((span for span in self.spans if span.trace_id == trace_id), key=lambda span: span.start)

    def wait_for(self, trace_id: str, *names: str, timeout: float = 60.0) -> list[ReceivedSpan]:
        """Wait until the trace has a span of each of these names (as often as it is named)."""
        until = time.monotonic() + timeout
        while True:
            spans = self.trace(trace_id)
            found = [span.name for span in spans]
            if all(found.count(name) >= names.count(name) for name in names):
                return spans
            assert time.monotonic() < until, f"of {names} there are {found}"
            time.sleep(0.02)

    def take(self, request: ExportTraceServiceRequest) -> None:
        received = [
            _received(span, _values(of_resource.resource.attributes))
            for of_resource in request.resource_spans
            for of_scope in of_resource.scope_spans
            for span in of_scope.spans
        ]
        with self._lock:
            self.num_requests += 1
            self._spans += received


@contextmanager
def otlp_over_http(*, hangs: bool = False) -> Iterator[OtlpReceiver]:
    """A receiver of POST /v1/traces. One that `hangs` reads and never answers."""
    receiver = OtlpReceiver()
    ended = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            receiver.headers = {name.lower(): value for name, value in self.headers.items()}
            assert self.path == "/v1/traces"
            receiver.take(ExportTraceServiceRequest.FromString(body))
            if hangs:
                ended.wait()
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: Any, client_address: Any) -> None:
            pass

    with Server(("127.0.0.1", 0), Handler) as server:
        receiver.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield receiver
        finally:
            ended.set()
            server.shutdown()


@contextmanager
def otlp_over_grpc() -> Iterator[OtlpReceiver]:
    receiver = OtlpReceiver()

    class Service(TraceServiceServicer):
        def Export(self, request: ExportTraceServiceRequest, context: Any) -> ExportTraceServiceResponse:  # noqa: N802
            receiver.headers = dict(context.invocation_metadata())
            receiver.take(request)
            return ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(2))
    add_TraceServiceServicer_to_server(Service(), server)
    receiver.port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield receiver
    finally:
        server.stop(None)


def _received(span: Span, resource: dict[str, Any]) -> ReceivedSpan:
    return ReceivedSpan(
        name=span.name,
        kind=Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_").lower(),
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        start=span.start_time_unix_nano,
        end=span.end_time_unix_nano,
        attributes=_values(span.attributes),
        events=[(event.name, event.time_unix_nano, _values(event.attributes)) for event in span.events],
        is_error=span.status.code == Status.STATUS_CODE_ERROR,
        status=span.status.message,
        resource=resource,
        state=span.trace_state,
    )


def _values(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair) for pair in pairs}


def _value(pair: KeyValue) -> Any:
    return _plain(pair.value)


def _plain(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_plain(each) for each in value.array_value.values]
    return getattr(value, kind) if kind else None
