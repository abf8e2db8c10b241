"""What one HTTP request does and when, recorded while it runs, for its trace.

`http/middleware/tracing.py` begins and ends it; prompts, engines and output tell it what they do, wherever they are
reached by `current_trace` or `Generation.trace`. Where there are no traces, NO_TRACE and UNTRACED do nothing.
"""

import time
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar, Token
from typing import Any

from shared.tracing import Attributes, FinishedSpan, SpanEvent, SpanKind, TraceContext, new_span_id, parse_w3c

# Of one request, whose choices and failovers may be many. Beyond it nothing is recorded of them, and engines are not
# told of the trace, so that no span of theirs lacks its parent.
MAX_ATTEMPTS = 100

# Where the request's trace is in the ASGI scope.
TRACE = "tandem.trace"


class GenerationTrace:
    """One choice's way through engines, as nobody wants to know it: the methods do nothing."""

    __slots__ = ()

    def next_attempt(self) -> list[str]:
        """The next ADD's trace context."""
        return []

    def sent(self, engine: str) -> None:
        """The ADD has gone to this engine's address."""

    def first_output(self, cached_tokens: int) -> None:
        """The first output of this attempt is here; so many of its prompt tokens were cached."""

    def ended(self, outcome: str, num_output_tokens: int, error: str | None = None) -> None:
        """The attempt is over. `num_output_tokens` counts the tokens of all attempts so far."""


UNTRACED = GenerationTrace()


class RequestTrace:
    """One request's trace. `context` is its HTTP span. One that is not `recording` only knows its ids."""

    __slots__ = (
        "_parent",
        "_spans",
        "attempts",
        "attributes",
        "content",
        "context",
        "details",
        "error",
        "error_status",
        "generation_id",
        "recording",
        "started",
    )

    def __init__(self, context: TraceContext, parent: TraceContext | None, *, recording: bool, content: bool) -> None:
        self.context = context
        self.recording = recording
        self.content = content  # whether texts are recorded too
        self.started = time.time_ns()
        self.attempts = 0
        self.error: str | None = None
        self.error_status = 0
        # Called when the spans are made, which of most requests they never are: what puts the generation's attributes
        # together, or records a span more. Where there are none of them, it did not come to a generation.
        self.details: list[Callable[[], None]] = []
        self.attributes: Attributes = {}
        self.generation_id = new_span_id() if recording else 0
        self._parent = parent
        self._spans: list[FinishedSpan] = []

    @property
    def sampled(self) -> bool:
        return self.context.sampled

    def new_span(
        self,
        name: str,
        start: int,
        attributes: Attributes | None = None,
        *,
        end: int = 0,
        kind: SpanKind = "internal",
        span_id: int = 0,
        error: str | None = None,
        events: list[SpanEvent] | None = None,
    ) -> None:
        """Record a span below the generation's that began at `start` (Unix nanoseconds) and ends now, or at `end`."""
        if not self.recording:
            return
        self._spans.append(
            FinishedSpan(
                name,
                self.context.trace_id,
                span_id or new_span_id(),
                self.generation_id,
                start,
                end or time.time_ns(),
                attributes or {},
                events or [],
                kind,
                error,
                state=self.context.state,
            )
        )

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Record what runs inside. From any thread."""
        if not self.recording:
            yield
            return
        began = time.time_ns()
        error: str | None = None
        try:
            yield
        except Exception as failure:
            error = type(failure).__name__
            raise
        finally:
            self.new_span(name, began, error=error)

    def fail(self, error: str, status: int) -> None:
        """The generation ended with an error, whatever status the client has been told already."""
        if self.recording:
            self.error, self.error_status = error, status

    def forget(self) -> None:
        """The request is over. What records it refers to this trace, and this trace to that: thousands of such cycles a
        second would be the garbage collector's to find."""
        self.details.clear()
        self._spans.clear()

    def generation(self, index: int) -> GenerationTrace:
        """For one of the request's choices."""
        return RecordedGeneration(self, index) if self.recording else UNTRACED

    def spans(self, name: str, attributes: Attributes, error: str | None) -> list[FinishedSpan]:
        """All of it, the HTTP span (`name`, `attributes`, `error`) first, which ends now."""
        for describe in self.details:
            describe()
        now = time.time_ns()
        parent_id = 0 if self._parent is None else self._parent.span_id
        context = self.context
        root = FinishedSpan(
            name,
            context.trace_id,
            context.span_id,
            parent_id,
            self.started,
            now,
            attributes,
            kind="server",
            error=error,
            parent_is_remote=True,
            state=context.state,
        )
        if self.attempts > MAX_ATTEMPTS:
            root.attributes["tandem.trace.attempts_left_out"] = self.attempts - MAX_ATTEMPTS
        if not self.details:
            # What there is belongs to the HTTP span.
            for span in self._spans:
                span.parent_id = root.span_id
            return [root, *self._spans]
        generation = FinishedSpan(
            f"{self.attributes['gen_ai.operation.name']} {self.attributes['gen_ai.request.model']}",
            context.trace_id,
            self.generation_id,
            root.span_id,
            self.started,
            now,
            self.attributes,
            error=error,
            state=context.state,
        )
        return [root, generation, *self._spans]


NO_TRACE = RequestTrace(TraceContext(0, 0, False), None, recording=False, content=False)

_current: ContextVar[RequestTrace] = ContextVar("request's trace", default=NO_TRACE)


def current_trace() -> RequestTrace:
    """Of the HTTP request that the running task answers. Not in a thread of its own."""
    return _current.get()


def set_current_trace(trace: RequestTrace) -> Token[RequestTrace]:
    return _current.set(trace)


def trace_context_of(scope: MutableMapping[str, Any]) -> list[str]:
    """The W3C context of an HTTP request, for shared.tracing's trace_id and is_sampled: its own span's, or, where this
    server keeps no traces, that which the client sent. Empty where there is none."""
    trace: RequestTrace | None = scope.get(TRACE)
    if trace is not None:
        return trace.context.as_w3c()
    parent = client_context(scope)
    return [] if parent is None else parent.as_w3c()


def trace_of(scope: MutableMapping[str, Any]) -> tuple[str, bool]:
    """The trace id of an HTTP request, as `trace_context_of` has it, in hex, and whether the trace is kept."""
    trace: RequestTrace | None = scope.get(TRACE)
    context = client_context(scope) if trace is None else trace.context
    return ("", False) if context is None else (f"{context.trace_id:032x}", context.sampled)


def client_context(scope: MutableMapping[str, Any]) -> TraceContext | None:
    """The span of the client's that this request is part of."""
    traceparent = None
    state: list[str] = []
    for name, value in scope["headers"]:
        if name == b"traceparent":
            if traceparent is not None:
                return None  # which of them?
            traceparent = value.decode("latin-1")
        elif name == b"tracestate":
            state.append(value.decode("latin-1"))
    return None if traceparent is None else parse_w3c([traceparent, ",".join(state)])


class RecordedGeneration(GenerationTrace):
    """One choice's way through engines: for each attempt a `route` span, until its ADD was sent, and a `generate` span
    from then on, whose children are the engine's own spans."""

    __slots__ = (
        "_engine",
        "_events",
        "_index",
        "_is_kept",
        "_num_output_tokens",
        "_number",
        "_request",
        "_sent_at",
        "_since",
        "_span_id",
    )

    def __init__(self, request: RequestTrace, index: int) -> None:
        self._request = request
        self._index = index
        self._number = 0
        self._is_kept = True
        self._num_output_tokens = 0
        self._engine = ""  # of the attempt under way; empty while an engine is sought
        self._since = self._sent_at = time.time_ns()
        self._span_id = 0
        self._events: list[SpanEvent] = []

    def next_attempt(self) -> list[str]:
        # Before the ADD leaves: an engine may begin with it before this process has noted that it is gone.
        self._sent_at = time.time_ns()
        request = self._request
        if not request.sampled or request.attempts >= MAX_ATTEMPTS:
            return []
        self._span_id = new_span_id()
        context = request.context
        return TraceContext(context.trace_id, self._span_id, True, context.state).as_w3c()

    def sent(self, engine: str) -> None:
        self._request.attempts += 1
        self._number += 1
        self._is_kept = self._request.attempts <= MAX_ATTEMPTS
        if self._is_kept:
            self._request.new_span("route", self._since, self._attributes(engine), end=self._sent_at)
        self._engine = engine
        self._since = self._sent_at

    def first_output(self, cached_tokens: int) -> None:
        self._events.append(SpanEvent("first_output", time.time_ns(), {"tandem.cached_tokens": cached_tokens}))

    def ended(self, outcome: str, num_output_tokens: int, error: str | None = None) -> None:
        attributes = {**self._attributes(self._engine), "tandem.outcome": outcome}
        if not self._engine:
            # It ended while it waited for an engine.
            self._request.new_span("route", self._since, attributes, error=error)
        elif self._is_kept:
            attributes["gen_ai.usage.output_tokens"] = num_output_tokens - self._num_output_tokens
            self._request.new_span(
                "generate",
                self._since,
                attributes,
                kind="client",
                span_id=self._span_id,
                error=error,
                events=self._events,
            )
        self._engine = ""
        self._events = []
        self._num_output_tokens = num_output_tokens
        self._since = time.time_ns()

    def _attributes(self, engine: str) -> Attributes:
        attributes: Attributes = {"tandem.choice": self._index, "tandem.attempt": self._number}
        if engine:
            host, _, port = engine.rpartition(":")
            attributes["server.address"] = host.strip("[]")
            if port.isdigit():
                attributes["server.port"] = int(port)
        return attributes
