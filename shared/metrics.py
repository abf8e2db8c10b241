"""What both services count with and how it is exposed: metrics described once, a cheap histogram, Prometheus' formats.

Each service has a catalogue of `Metric`s (services/*/…/catalogue); docs/metrics.md is written from them.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, Exemplar, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.exposition import choose_encoder
from prometheus_client.utils import floatToGoString  # pyright: ignore[reportUnknownVariableType]

Labels = tuple[str, ...]

# Of one process's processors, memory and descriptors; prometheus_client's ProcessCollector has these.
PROCESS_METRICS = (
    "process_cpu_seconds_total",
    "process_max_fds",
    "process_open_fds",
    "process_resident_memory_bytes",
    "process_start_time_seconds",
    "process_virtual_memory_bytes",
)


@dataclass(frozen=True, slots=True, eq=False)
class Metric:
    """One metric as queries name it (a counter's name ends in _total). `buckets` are a histogram's upper bounds.

    `sharing` says what a gauge is of several processes behind one port: their sum, or the least or most of any."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    text: str
    labels: Labels = ()
    buckets: tuple[float, ...] = ()
    sharing: Literal["livesum", "livemin", "livemax"] = "livesum"

    def distribution(self) -> "Distribution":
        """An empty one, for a histogram."""
        return Distribution(self.buckets)


class Distribution:
    """A histogram with one writer, at a tenth of the cost of prometheus_client's, which serves many threads and
    writes to a shared file where several processes count together. Any thread may read."""

    __slots__ = ("_counts", "_exemplars", "buckets", "total")

    def __init__(self, buckets: Sequence[float]) -> None:
        self.buckets = tuple(buckets)
        self.total = 0.0
        self._counts = [0] * (len(self.buckets) + 1)
        self._exemplars: dict[int, Exemplar] = {}

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self.buckets, value)] += 1
        self.total += value

    def observe_traced(self, value: float, trace_id: str, time: float) -> None:
        """`observe`, and keep the trace as an example of its bucket. `time` in Unix seconds."""
        self.observe(value)
        self._exemplars[bisect_left(self.buckets, value)] = Exemplar({"trace_id": trace_id}, value, time)

    @property
    def count(self) -> int:
        return sum(self._counts)

    def counts(self) -> list[int]:
        """Observations in each bucket alone, the last being those above all bounds."""
        return self._counts[:]

    def exemplar(self, bucket: int) -> Exemplar | None:
        return self._exemplars.get(bucket)


Value = float | Distribution


def family(metric: Metric, values: Mapping[Labels, Value]) -> Family:
    """What a scrape shows of a metric now: one value, or a Distribution of a histogram, for each set of labels."""
    if metric.kind == "histogram":
        shown = HistogramMetricFamily(metric.name, metric.text, labels=metric.labels)
        for labels, value in values.items():
            assert isinstance(value, Distribution)
            shown.add_metric(labels, _cumulative(value), value.total)
        return shown
    make = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
    shown = make(metric.name, metric.text, labels=metric.labels)
    for labels, value in values.items():
        assert not isinstance(value, Distribution)
        shown.add_metric(labels, value)
    return shown


def bound_names(buckets: Sequence[float]) -> list[str]:
    """The values of the label `le`."""
    names: list[str] = [floatToGoString(bound) for bound in buckets]
    return [*names, "+Inf"]


def exposition(families: Iterable[Family], accept: str) -> tuple[bytes, str]:
    """The families in the format that the scraper's Accept header asks for, and its content type: Prometheus' text,
    or OpenMetrics, which alone carries exemplars."""
    encode, content_type = choose_encoder(accept)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Taken(list(families)))
    return encode(registry), content_type


class _Taken:
    def __init__(self, families: list[Family]) -> None:
        self._families = families

    def collect(self) -> list[Family]:
        return self._families

    def describe(self) -> list[Family]:
        return []


def _cumulative(distribution: Distribution) -> list[tuple[str, float] | tuple[str, float, Exemplar]]:
    shown: list[tuple[str, float] | tuple[str, float, Exemplar]] = []
    counts = accumulate(distribution.counts())
    for bucket, (name, count) in enumerate(zip(bound_names(distribution.buckets), counts, strict=True)):
        exemplar = distribution.exemplar(bucket)
        shown.append((name, count) if exemplar is None else (name, count, exemplar))
    return shown
