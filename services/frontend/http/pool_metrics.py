"""What the engine pools count, read when it is asked for: a token pays nothing. Part of the registry in `metrics`."""

from collections.abc import Iterable, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.frontend.http.loaded_model import LoadedModel

_COUNTS = {
    "failovers": "Times that a request went on elsewhere because its engine was lost.",
    "handovers": "Times that a request went on elsewhere because its engine drains.",
    "overloads": "Times that an engine refused a request for want of room.",
    "given_up": "Requests that this side ended with an error.",
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
