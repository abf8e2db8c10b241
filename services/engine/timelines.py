"""When each sampled request waited, was prefilled and decoded: records for its trace, taken around the steps.

`core` tells of requests and steps. Nothing here looks at any but the sampled requests, so that a step pays for none
where none is; what is finished goes by `loop` to the link's thread, which makes spans of it.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from services.engine.request import Request, RequestStatus
from shared.protocol import FinishReason
from shared.tracing import Attributes, FinishedSpan, SpanEvent, TraceContext, new_span_id, parse_w3c

# Of one request here: a long prompt in small chunks, or one that is preempted again and again. Further chunks count as
# part of the last one.
MAX_SPANS = 100

Samples = Callable[[int, TraceContext | None], bool]


@dataclass(slots=True, eq=False)
class _Timeline:
    """One request. Times in Unix nanoseconds; `start` and `known` are its computed and its known tokens as the running
    step found them."""

    request: Request
    parent: TraceContext
    queued_at: int
    queue_attributes: Attributes
    is_queued: bool = True
    num_preemptions: int = 0
    start: int = 0
    known: int = 0
    cached: int | None = None  # by the prefix cache, of the chunk to come
    first_token_at: int = 0
    last_token_at: int = 0
    longest_gap: int = 0
    num_tokens: int = 0  # made here
    events: list[SpanEvent] = field(default_factory=list[SpanEvent])
    num_spans: int = 0
    chunk: FinishedSpan | None = None  # the last
    chunk_tokens: int = 0
    spans: list[FinishedSpan] = field(default_factory=list[FinishedSpan])


class Timelines:
    """The sampled requests of one engine. Belongs to the loop's thread. `samples` is the sampler's word on a request
    whose frontend keeps its trace; without it there are no traces here."""

    def __init__(self, samples: Samples | None = None) -> None:
        self.finished: list[FinishedSpan] = []
        self._samples = samples
        self._running: dict[Request, _Timeline] = {}
        self._step_began = 0

    def __bool__(self) -> bool:
        """Whether any request is being watched."""
        return bool(self._running)

    def begin(self, request: Request, num_waiting: int) -> None:
        """A request was queued behind `num_waiting` others."""
        parent = parse_w3c(request.trace_context)
        if parent is None or self._samples is None or not self._samples(parent.trace_id, parent):
            return
        attributes: Attributes = {"tandem.queue.requests_ahead": num_waiting}
        if request.num_output_tokens:
            attributes["tandem.resumed_tokens"] = request.num_output_tokens
        self._running[request] = _Timeline(request, parent, time.time_ns(), attributes)

    def step_begins(self) -> None:
        """A step is scheduled, and about to be computed."""
        now = self._step_began = time.time_ns()
        for timeline in self._running.values():
            request = timeline.request
            if request.num_preemptions != timeline.num_preemptions:
                self._preempted(timeline, now)
            if timeline.is_queued and request.status is RequestStatus.RUNNING:
                self._queued(timeline, now)
                timeline.is_queued = False
                timeline.cached = request.num_computed_tokens
            timeline.start = request.num_computed_tokens
            timeline.known = len(request.token_ids)

    def step_ends(self) -> None:
        """The step's results are in the requests, and those that ended have been told."""
        began, self._step_began = self._step_began, 0
        now = time.time_ns()
        for timeline in list(self._running.values()):
            request = timeline.request
            is_over = request.status is RequestStatus.FINISHED
            if not timeline.is_queued:
                computed = timeline.known if is_over else request.num_computed_tokens
                if computed > timeline.start:
                    self._computed(timeline, computed - timeline.start, began, now)
            if is_over:
                self._ended(timeline, now)

    def end(self, request: Request) -> None:
        """A request has ended. In the middle of a step, its share of that is still to come."""
        timeline = self._running.get(request)
        if timeline is not None and not self._step_began:
            self._ended(timeline, time.time_ns())

    def take_finished(self) -> list[FinishedSpan]:
        finished, self.finished = self.finished, []
        return finished

    def _preempted(self, timeline: _Timeline, now: int) -> None:
        timeline.num_preemptions = timeline.request.num_preemptions
        event = SpanEvent("preempted", now, {"tandem.preemptions": timeline.num_preemptions})
        if timeline.first_token_at:
            timeline.events.append(event)
        elif timeline.spans:
            timeline.spans[-1].events.append(event)
        timeline.is_queued = True
        timeline.queued_at = now
        timeline.queue_attributes = {"tandem.preempted": True}

    def _queued(self, timeline: _Timeline, now: int, error: str | None = None) -> None:
        if timeline.num_spans < MAX_SPANS:
            self._add(timeline, "queue", timeline.queued_at, now, timeline.queue_attributes, error=error)

    def _computed(self, timeline: _Timeline, num_tokens: int, began: int, now: int) -> None:
        if not timeline.first_token_at or timeline.known - timeline.start > 1:
            self._prefilled(timeline, num_tokens, began, now)
        if len(timeline.request.token_ids) == timeline.known:
            return
        timeline.num_tokens += 1
        if not timeline.first_token_at:
            timeline.first_token_at = now
            # What is over goes out now: should this engine die, its trace still shows how far the request had come.
            self._hand_out(timeline)
        else:
            timeline.longest_gap = max(timeline.longest_gap, now - timeline.last_token_at)
        timeline.last_token_at = now
        number = timeline.num_tokens
        if number & (number - 1) == 0:  # the first, and ever fewer of the later ones
            name = "first_token" if number == 1 else "token"
            timeline.events.append(SpanEvent(name, now, {"tandem.token": number}))

    def _prefilled(self, timeline: _Timeline, num_tokens: int, began: int, now: int) -> None:
        if timeline.num_spans >= MAX_SPANS:
            if timeline.chunk is not None:
                timeline.chunk.end = now
                timeline.chunk_tokens += num_tokens
                timeline.chunk.attributes["tandem.prefill.tokens"] = timeline.chunk_tokens
            return
        attributes: Attributes = {
            "tandem.prefill.start": timeline.start,
            "tandem.prefill.tokens": num_tokens,
            "tandem.prefill.cached_tokens": timeline.cached or 0,
        }
        timeline.cached = None
        if timeline.num_preemptions:
            attributes["tandem.prefill.recompute"] = True
        self._add(timeline, "prefill", began, now, attributes)
        timeline.chunk, timeline.chunk_tokens = timeline.spans[-1], num_tokens

    def _ended(self, timeline: _Timeline, now: int) -> None:
        request = timeline.request
        del self._running[request]
        reason = request.finish_reason or FinishReason.ERROR
        error = "the request failed here; the engine's log says why" if reason is FinishReason.ERROR else None
        if timeline.is_queued:
            self._queued(timeline, now, error)
        if timeline.first_token_at:
            attributes: Attributes = {
                "gen_ai.usage.output_tokens": timeline.num_tokens,
                "tandem.decode.longest_gap_seconds": timeline.longest_gap / 1e9,
                "tandem.preemptions": timeline.num_preemptions,
            }
            self._add(timeline, "decode", timeline.first_token_at, now, attributes, timeline.events, error)
        if timeline.spans:
            last = timeline.spans[-1]
            last.attributes["tandem.finish_reason"] = reason.name.lower()
            last.error = error
        self._hand_out(timeline)

    def _hand_out(self, timeline: _Timeline) -> None:
        self.finished += timeline.spans
        timeline.spans = []
        timeline.chunk = None

    @staticmethod
    def _add(
        timeline: _Timeline,
        name: str,
        start: int,
        end: int,
        attributes: Attributes,
        events: Iterable[SpanEvent] = (),
        error: str | None = None,
    ) -> None:
        parent = timeline.parent
        timeline.num_spans += 1
        timeline.spans.append(
            FinishedSpan(
                name,
                parent.trace_id,
                new_span_id(),
                parent.span_id,
                start,
                end,
                attributes,
                list(events),
                error=error,
                parent_is_remote=True,
                state=parent.state,
            )
        )
