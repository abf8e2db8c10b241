"""Finished spans on their way out, through OpenTelemetry's SDK: its sampler, resource, limits, queue and exporters.

`tracing` imports this only where traces are asked for. Everything here obeys the OTEL_… variables.
"""

import logging
import os
import socket
import threading
import time
from collections.abc import Iterable
from urllib.parse import urlsplit

from opentelemetry.context import Context
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter
from opentelemetry.sdk.trace.id_generator import IdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, StatusCode, TraceFlags, set_span_in_context
from opentelemetry.trace.span import TraceState

from shared.tracing import FinishedSpan, TraceContext, TracingConfigError, new_span_id
from shared.version import server_version

logger = logging.getLogger(__name__)

# A process that ends gives a slow receiver so long; then what is queued is lost.
CLOSE_SECONDS = 5.0

_KINDS = {"internal": SpanKind.INTERNAL, "server": SpanKind.SERVER, "client": SpanKind.CLIENT}
_GRPC_PORT = 4317  # by OpenTelemetry's convention; HTTP's is 4318
_COMPLAINT_SECONDS = 60.0
_STATE_LOGGER = "opentelemetry.trace.span"
_LOGGERS = {
    "grpc": "opentelemetry.exporter.otlp.proto.grpc.exporter",
    "http/protobuf": "opentelemetry.exporter.otlp.proto.http.trace_exporter",
}


class SpanExport:
    """The process's one Tracing (see `tracing`). Any thread may call `export`. Raises TracingConfigError."""

    def __init__(self, service: str, exporters: list[SpanExporter] | None = None) -> None:
        self._ids = _GivenIds()
        _quieten(_STATE_LOGGER)  # it complains of a client's malformed tracestate once a span
        try:
            # The sampler of the variables decides, once a request; what is then exported is exported whole.
            self._sampler = TracerProvider(shutdown_on_exit=False).sampler
            self._provider = TracerProvider(
                sampler=ALWAYS_ON, resource=_resource(service), id_generator=self._ids, shutdown_on_exit=False
            )
            for exporter in _exporters() if exporters is None else exporters:
                self._provider.add_span_processor(BatchSpanProcessor(exporter))
        except TracingConfigError:
            raise
        except ValueError as error:
            raise TracingConfigError(f"the OTEL_… variables make no sense: {error}") from error
        self._tracer = self._provider.get_tracer("tandem", server_version())
        self._lock = threading.Lock()

    def samples(self, trace_id: int, parent: TraceContext | None) -> bool:
        context = None if parent is None else _parent_context(parent, is_remote=True)
        return self._sampler.should_sample(context, trace_id, "").decision.is_sampled()

    def export(self, spans: Iterable[FinishedSpan]) -> None:
        try:
            with self._lock:
                for span in spans:
                    self._export(span)
        except Exception:
            logger.exception("Spans could not be exported; the requests they are of are not affected")

    def _export(self, span: FinishedSpan) -> None:
        self._ids.trace_id, self._ids.span_id = span.trace_id, span.span_id
        parent = TraceContext(span.trace_id, span.parent_id, True, span.state)
        recorded = self._tracer.start_span(
            span.name,
            context=_parent_context(parent, is_remote=span.parent_is_remote),
            kind=_KINDS[span.kind],
            attributes=span.attributes,
            start_time=span.start,
        )
        for event in span.events:
            recorded.add_event(event.name, event.attributes, event.time)
        if span.error is not None:
            recorded.set_status(StatusCode.ERROR, span.error)
        # A clock that was set back must not make a span of a negative length.
        recorded.end(max(span.start, span.end))

    def close(self) -> None:
        # The SDK would wait half a minute for a receiver that hangs.
        closing = threading.Thread(target=self._provider.shutdown, name="traces' end", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)
        if closing.is_alive():
            logger.warning(
                "The receiver of traces did not take the last spans within %g s: they are lost", CLOSE_SECONDS
            )


class _GivenIds(IdGenerator):
    """Gives the next span the ids by which other processes know it already."""

    trace_id = 0
    span_id = 0

    def generate_trace_id(self) -> int:
        return self.trace_id

    def generate_span_id(self) -> int:
        return self.span_id or new_span_id()


class _Seldom(logging.Filter):
    """Lets a message of one kind through once a minute, however often a receiver fails."""

    def __init__(self) -> None:
        super().__init__()
        self._next: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        now = time.monotonic()
        if now < self._next.get(record.msg, 0.0):
            return False
        self._next[record.msg] = now + _COMPLAINT_SECONDS
        return True


def _quieten(name: str) -> None:
    complaining = logging.getLogger(name)
    if not any(isinstance(known, _Seldom) for known in complaining.filters):
        complaining.addFilter(_Seldom())


def _parent_context(parent: TraceContext, *, is_remote: bool) -> Context:
    if not parent.span_id:
        return Context()
    flags = TraceFlags(TraceFlags.SAMPLED if parent.sampled else TraceFlags.DEFAULT)
    state = TraceState.from_header([parent.state]) if parent.state else None
    span_context = SpanContext(parent.trace_id, parent.span_id, is_remote, flags, state)
    return set_span_in_context(NonRecordingSpan(span_context), Context())


def _resource(service: str) -> Resource:
    own = {
        "service.name": f"tandem-{service}",
        "service.version": server_version(),
        "service.instance.id": f"{socket.gethostname()}-{os.getpid()}",
    }
    # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES have the last word.
    return Resource.create({**own, **OTELResourceDetector().detect().attributes})


def _exporters() -> list[SpanExporter]:
    names = [name.strip() for name in os.environ.get("OTEL_TRACES_EXPORTER", "").split(",") if name.strip()]
    return [_exporter(name) for name in names or ["otlp"]]


def _exporter(name: str) -> SpanExporter:
    if name == "console":
        return ConsoleSpanExporter()
    if name != "otlp":
        raise TracingConfigError(f"OTEL_TRACES_EXPORTER names {name!r}; there are otlp, console and none")
    protocol = _protocol()
    try:
        if protocol == "grpc":
            from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

            exporter: SpanExporter = GrpcExporter()
        elif protocol == "http/protobuf":
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

            exporter = HttpExporter()
        else:
            raise TracingConfigError(f"OTEL_EXPORTER_OTLP_PROTOCOL is {protocol!r}; there are http/protobuf and grpc")
    except ImportError as error:
        raise TracingConfigError(f"the exporter for {protocol} is not installed: {error}") from error
    # They complain of every batch that a receiver does not take.
    _quieten(_LOGGERS[protocol])
    return exporter


def _protocol() -> str:
    for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        if os.environ.get(name, "").strip():
            return os.environ[name].strip().lower()
    for name in ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"):
        endpoint = os.environ.get(name, "").strip()
        if endpoint:
            return "grpc" if urlsplit(endpoint).port == _GRPC_PORT else "http/protobuf"
    return "http/protobuf"
