"""One request, one trace: W3C trace contexts as they cross HTTP and the link, and a process's way out for its spans.

Spans are kept as plain records while a request runs and handed over when it has ended. OpenTelemetry is imported by
`span_export`, and only where the OTEL_… variables ask for traces.
"""

import os
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

SpanKind = Literal["internal", "server", "client"]
AttributeValue = str | bool | int | float | Sequence[str]
Attributes = dict[str, AttributeValue]

# Naming an exporter or an endpoint asks for traces. The specification's own default would be to send them to this
# machine's port 4318, asked or not.
_ASKING = ("OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.ASCII)
_STATE_KEY = r"[a-z][_0-9a-z\-*/]{0,255}|[a-z0-9][_0-9a-z\-*/]{0,240}@[a-z][_0-9a-z\-*/]{0,13}"
_STATE_MEMBER = re.compile(rf"(?:{_STATE_KEY})=[ -+\--<>-~]{{0,255}}[!-+\--<>-~]")
_MAX_STATE_MEMBERS = 32
# Enough for every vendor's entry (W3C asks for 512 at least), and well within the link's limit of a text.
_MAX_TRACESTATE = 2048


class TracingConfigError(ValueError):
    """The OTEL_… variables ask for what cannot be done. The message is one line that says what to do."""


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A span as another process names it to this one. `state` is the tracestate, as it came."""

    trace_id: int
    span_id: int
    sampled: bool
    state: str = ""

    def as_w3c(self) -> list[str]:
        """traceparent and, if there is one, tracestate: what ADD carries as `trace_context`."""
        traceparent = f"00-{self.trace_id:032x}-{self.span_id:016x}-{self.sampled:02x}"
        return [traceparent, self.state] if self.state else [traceparent]


def parse_w3c(context: Sequence[str]) -> TraceContext | None:
    """The context that a traceparent and a tracestate describe; None where there is none, or none that is valid."""
    match = _TRACEPARENT.fullmatch(context[0].strip()) if context else None
    if match is None:
        return None
    version, trace_id, span_id, flags, more = match.groups()
    # Of a later version the first four fields are to be understood; of this one there are no more.
    if version == "ff" or (version == "00" and more) or not int(trace_id, 16) or not int(span_id, 16):
        return None
    state = context[1].strip() if len(context) > 1 else ""
    if state and not _is_tracestate(state):
        state = ""
    return TraceContext(int(trace_id, 16), int(span_id, 16), bool(int(flags, 16) & 1), state)


def _is_tracestate(state: str) -> bool:
    """Whether it is a list of vendors' entries as W3C defines it. OpenTelemetry logs any other, once a span."""
    if len(state) > _MAX_TRACESTATE:
        return False
    members = [member for part in state.split(",") if (member := part.strip(" \t"))]
    return len(members) <= _MAX_STATE_MEMBERS and all(map(_STATE_MEMBER.fullmatch, members))


def trace_id(context: Sequence[str]) -> str:
    """The trace id in a W3C context (`Add.trace_context`), as logs and exemplars name it: 32 hex digits, or ""."""
    parsed = parse_w3c(context)
    return "" if parsed is None else f"{parsed.trace_id:032x}"


def is_sampled(context: Sequence[str]) -> bool:
    """Whether the trace of this context is being kept: an exemplar of another would lead nowhere."""
    parsed = parse_w3c(context)
    return parsed is not None and parsed.sampled


def new_trace_id() -> int:
    return random.getrandbits(128) or 1


def new_span_id() -> int:
    return random.getrandbits(64) or 1


@dataclass(slots=True)
class SpanEvent:
    """Something that happened at one moment of a span. `time` in Unix nanoseconds."""

    name: str
    time: int
    attributes: Attributes = field(default_factory=Attributes)


@dataclass(slots=True)
class FinishedSpan:
    """One span, whole. Times in Unix nanoseconds; `parent_id` 0 for a trace's first. `error` is the status's text."""

    name: str
    trace_id: int
    span_id: int
    parent_id: int
    start: int
    end: int
    attributes: Attributes = field(default_factory=Attributes)
    events: list[SpanEvent] = field(default_factory=list[SpanEvent])
    kind: SpanKind = "internal"
    error: str | None = None
    parent_is_remote: bool = False
    state: str = ""


class Tracing(Protocol):
    """A process's traces: which requests are sampled, and where finished spans go."""

    def samples(self, trace_id: int, parent: TraceContext | None) -> bool:
        """The sampler's word on a trace (OTEL_TRACES_SAMPLER), `parent` being the caller's span."""
        ...

    def export(self, spans: Iterable[FinishedSpan]) -> None:
        """Queue spans to be sent. Never waits and never raises; where the queue is full, spans are lost."""
        ...

    def close(self) -> None:
        """Send what is queued, within a few seconds, and end."""
        ...


def wants_tracing(variables: Mapping[str, str] = os.environ) -> bool:
    """Whether the environment asks for traces."""
    if variables.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    if variables.get("OTEL_TRACES_EXPORTER", "").strip().lower() == "none":
        return False
    return any(variables.get(name, "").strip() for name in _ASKING)


def start_tracing(service: str) -> Tracing | None:
    """This process's traces, as the OTEL_… variables say; None where they ask for none. Raises TracingConfigError."""
    if not wants_tracing():
        return None
    from shared.span_export import SpanExport

    return SpanExport(service)
