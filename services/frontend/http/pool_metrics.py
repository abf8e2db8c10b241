"""What the engine pools count, read when it is asked for: a token pays nothing. Part of the registry in `metrics`."""

from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.frontend.http.loaded_model import LoadedModel

_COUNTS = {
    "failovers": "Times that a request went on elsewhere because its engine was lost.",
    "handovers": "Times that a request went on elsewhere because its engine drains.",
    "overloads": "Times that an engine refused a request for want of room.",
    "given_up": "Requests that this side ended with an error.",
    "handshake_failures": "Times that an engine was reached and no link came of it: a wrong key, most likely.",
}


class PoolMetrics(Collector):
    """One line for each model."""

    def __init__(self, models: Sequence[LoadedModel]) -> None:
        self._models = models

    def collect(self) -> Iterable[Metric]:
        """Called by the registry at every scrape, on the event loop."""
        engines = GaugeMetricFamily(
            "tandem_frontend_engines_ready", "Engines that take requests now.", labels=["model"]
        )
        in_flight = GaugeMetricFamily(
            "tandem_frontend_generations_in_flight",
            "Choices that an engine has or that wait for one.",
            labels=["model"],
        )
        for model in self._models:
            engines.add_metric([model.names[0]], model.engines.num_ready)
            in_flight.add_metric([model.names[0]], model.engines.num_requests)
        yield engines
        yield in_flight
        for name, text in _COUNTS.items():
            counter = CounterMetricFamily(f"tandem_frontend_{name}", text, labels=["model"])
            for model in self._models:
                counter.add_metric([model.names[0]], getattr(model.engines.counts, name))
            yield counter


class SharedPoolMetrics:
    """The same for one of several processes: `publish` puts its numbers where the others' are added to them."""

    def __init__(self, models: Sequence[LoadedModel], registry: CollectorRegistry) -> None:
        self._own = PoolMetrics(models)
        self._registry = registry
        self._gauges: dict[str, Gauge] = {}
        self._counters: dict[str, Counter] = {}
        self._counted: dict[tuple[str, str], float] = {}

    def publish(self) -> None:
        for family in self._own.collect():
            for sample in family.samples:
                model = sample.labels["model"]
                if family.type == "gauge":
                    self._gauge(family).labels(model).set(sample.value)
                else:
                    counted = self._counted.get((family.name, model), 0.0)
                    self._counted[family.name, model] = sample.value
                    self._counter(family).labels(model).inc(sample.value - counted)

    def _gauge(self, family: Metric) -> Gauge:
        if family.name not in self._gauges:
            # All processes see the same engines: the one that sees the fewest shows the trouble.
            mode = "livemin" if family.name.endswith("engines_ready") else "livesum"
            gauge = Gauge(family.name, family.documentation, ["model"], registry=self._registry, multiprocess_mode=mode)
            self._gauges[family.name] = gauge
        return self._gauges[family.name]

    def _counter(self, family: Metric) -> Counter:
        if family.name not in self._counters:
            counter = Counter(family.name, family.documentation, ["model"], registry=self._registry)
            self._counters[family.name] = counter
        return self._counters[family.name]
