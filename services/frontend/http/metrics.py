"""The frontend's own numbers, in Prometheus' text format.

Of several processes behind one port (`--workers`), each answers with the sum of all: the launcher names the folder that
they share in PROMETHEUS_MULTIPROC_DIR. A gauge therefore needs a `multiprocess_mode`.
"""

import os
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.multiprocess import MultiProcessCollector

from services.frontend.http.loaded_model import LoadedModel
from services.frontend.http.pool_metrics import PoolMetrics, SharedPoolMetrics


class Metrics:
    """One registry for each app, so that several can live in one process."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, models: Sequence[LoadedModel]) -> None:
        self._registry = CollectorRegistry()
        self._shared: SharedPoolMetrics | None = None
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
            self._shared = SharedPoolMetrics(models, self._registry)
        else:
            ProcessCollector(registry=self._registry)
            self._registry.register(PoolMetrics(models))
        self.requests = Counter(
            "tandem_frontend_requests",
            "HTTP requests by route and status; 499 where the client left before its answer.",
            ["route", "status"],
            registry=self._registry,
        )
        self.requests_in_flight = Gauge(
            "tandem_frontend_requests_in_flight",
            "HTTP requests being answered.",
            registry=self._registry,
            multiprocess_mode="livesum",
        )
        self.streams_in_flight = Gauge(
            "tandem_frontend_streams_in_flight",
            "Streamed answers being written.",
            registry=self._registry,
            multiprocess_mode="livesum",
        )
        self.streams_abandoned = Counter(
            "tandem_frontend_streams_abandoned", "Streams whose client left.", registry=self._registry
        )

    def publish(self) -> None:
        """Let the other processes behind this port, if there are any, see this one's engine pools."""
        if self._shared is not None:
            self._shared.publish()

    def exposition(self) -> bytes:
        if self._shared is None:
            return generate_latest(self._registry)
        self.publish()
        everybody = CollectorRegistry()
        MultiProcessCollector(everybody)
        return generate_latest(everybody)
