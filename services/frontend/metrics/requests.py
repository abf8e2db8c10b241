"""What is counted of HTTP requests, most of it once when a request is over: a token pays nothing."""

import time
from collections import Counter
from dataclasses import dataclass

from services.frontend.metrics import catalogue
from services.frontend.metrics.request_record import Generated
from shared.metrics import Distribution, Labels, Metric, Value

_PROVIDER = "tandem"
REASONS = (
    *("invalid", "unauthorized", "not_found", "too_large", "slow_body", "key_limit", "server_limit"),
    *("engines_full", "no_engine", "draining", "timeout", "failed"),
)
_DISCONNECTS = ("waiting", "streaming")


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a request ended. `error` is one of REASONS, or empty; `left` is "waiting" or "streaming" where the client
    left, or empty; `trace_id` that of a sampled trace, or empty."""

    route: str
    status: int
    seconds: float
    error: str = ""
    left: str = ""
    trace_id: str = ""


class Level:
    """A number that goes up and down."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0

    def inc(self) -> None:
        self.value += 1

    def dec(self) -> None:
        self.value -= 1


class RequestMetrics:
    """Of one process."""

    def __init__(self) -> None:
        self.in_flight = Level()
        self.streams_in_flight = Level()
        self._requests: Counter[Labels] = Counter()
        self._rejections: Counter[str] = Counter()
        self._disconnects: Counter[str] = Counter()
        self._stream_errors: Counter[str] = Counter()
        self._cached_tokens: Counter[Labels] = Counter()
        self._reasoning_tokens: Counter[Labels] = Counter()
        self._first_token: dict[Labels, Distribution] = {}
        self._per_token: dict[Labels, Distribution] = {}
        self._duration: dict[Labels, Distribution] = {}
        self._usage: dict[Labels, Distribution] = {}

    def ended(self, outcome: Outcome, generated: Generated | None, started: float) -> None:
        """Count a request that is over."""
        self._requests[outcome.route, str(outcome.status)] += 1
        if outcome.left:
            self._disconnects[outcome.left] += 1
        elif outcome.error and outcome.status >= 400:
            self._rejections[outcome.error] += 1
        elif outcome.error:
            self._stream_errors[outcome.error] += 1
        if generated is not None:
            self._count_generated(outcome, generated, started)

    def values(self) -> dict[Metric, dict[Labels, Value]]:
        return {
            catalogue.REQUESTS: dict(self._requests),
            catalogue.REQUESTS_IN_FLIGHT: {(): self.in_flight.value},
            catalogue.STREAMS_IN_FLIGHT: {(): self.streams_in_flight.value},
            catalogue.REJECTIONS: {(reason,): self._rejections[reason] for reason in REASONS},
            catalogue.DISCONNECTS: {(reason,): self._disconnects[reason] for reason in _DISCONNECTS},
            catalogue.STREAM_ERRORS: {(reason,): self._stream_errors[reason] for reason in REASONS},
            catalogue.CACHED_TOKENS: dict(self._cached_tokens),
            catalogue.REASONING_TOKENS: dict(self._reasoning_tokens),
            catalogue.TIME_TO_FIRST_TOKEN: dict(self._first_token),
            catalogue.TIME_PER_OUTPUT_TOKEN: dict(self._per_token),
            catalogue.REQUEST_DURATION: dict(self._duration),
            catalogue.TOKEN_USAGE: dict(self._usage),
        }

    def _count_generated(self, outcome: Outcome, generated: Generated, started: float) -> None:
        labels = (generated.operation, _PROVIDER, generated.model)
        trace = outcome.trace_id
        error = "client_left" if outcome.left else outcome.error
        _observe(self._duration, catalogue.REQUEST_DURATION, (*labels, error), outcome.seconds, trace)
        usage = generated.usage
        _observe(self._usage, catalogue.TOKEN_USAGE, (*labels, "input"), usage.prompt_tokens)
        _observe(self._usage, catalogue.TOKEN_USAGE, (*labels, "output"), generated.completion_tokens)
        self._cached_tokens[generated.model,] += usage.cached_tokens
        self._reasoning_tokens[generated.model,] += usage.reasoning_tokens
        if error:
            return
        first = generated.first_output_at
        if first and generated.completion_tokens:
            _observe(self._first_token, catalogue.TIME_TO_FIRST_TOKEN, labels, first - started, trace)
        for seconds in generated.seconds_per_token():
            _observe(self._per_token, catalogue.TIME_PER_OUTPUT_TOKEN, labels, seconds, trace)


def _observe(
    distributions: dict[Labels, Distribution], metric: Metric, labels: Labels, value: float, trace_id: str = ""
) -> None:
    distribution = distributions.get(labels)
    if distribution is None:
        distribution = distributions[labels] = metric.distribution()
    if trace_id:
        distribution.observe_traced(value, trace_id, time.time())
    else:
        distribution.observe(value)
