"""The frontend's own numbers, in Prometheus' text format."""

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from services.frontend.http.loaded_model import LoadedModel
from services.frontend.http.pool_metrics import PoolMetrics


class Metrics:
    """One registry for each app, so that several can live in one process."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, models: Sequence[LoadedModel]) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._registry.register(PoolMetrics(models))
        self.requests = Counter(
            "tandem_frontend_requests",
            "HTTP requests by route and status; 499 where the client left before its answer.",
            ["route", "status"],
            registry=self._registry,
        )
        self.requests_in_flight = Gauge(
            "tandem_frontend_requests_in_flight", "HTTP requests being answered.", registry=self._registry
        )
        self.streams_in_flight = Gauge(
            "tandem_frontend_streams_in_flight", "Streamed answers being written.", registry=self._registry
        )
        self.streams_abandoned = Counter(
            "tandem_frontend_streams_abandoned", "Streams whose client left.", registry=self._registry
        )

    def exposition(self) -> bytes:
        return generate_latest(self._registry)
