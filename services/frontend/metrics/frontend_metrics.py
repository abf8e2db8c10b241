"""All metrics of one frontend process, and what `/metrics` answers: its own, or those of all behind its port."""

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, ProcessCollector

from services.frontend.http.loaded_model import LoadedModel
from services.frontend.metrics import catalogue
from services.frontend.metrics.event_loop import EventLoopLag
from services.frontend.metrics.pools import pool_values
from services.frontend.metrics.requests import RequestMetrics
from services.frontend.metrics.shared_values import SharedValues
from shared.metrics import Labels, Metric, Value, exposition, family
from shared.version import server_version

_FOLDER = "PROMETHEUS_MULTIPROC_DIR"
_PUBLISH_INTERVAL = 0.5  # seconds


class FrontendMetrics:
    """One for each app, so that several can live in one process. Every method belongs to the event loop's thread."""

    def __init__(self, models: Sequence[LoadedModel], is_ready: Callable[[], bool]) -> None:
        self.requests = RequestMetrics()
        self.event_loop = EventLoopLag()
        self.streams_in_flight = self.requests.streams_in_flight
        self._models = models
        self._is_ready = is_ready
        self._process: CollectorRegistry | None = None
        self._shared: SharedValues | None = None
        if _FOLDER in os.environ:
            self._shared = SharedValues(os.environ[_FOLDER])
        else:
            self._process = CollectorRegistry()
            ProcessCollector(registry=self._process)

    @contextmanager
    def kept_up(self) -> Iterator[None]:
        """Watches the running event loop while the context lasts, and lets the other processes behind this port, if
        there are any, see this one's values."""
        shared = self._shared
        loop = asyncio.get_running_loop()
        timer: asyncio.TimerHandle | None = None

        def publish(shared: SharedValues) -> None:
            nonlocal timer
            shared.write(self._values())
            timer = loop.call_later(_PUBLISH_INTERVAL, publish, shared)

        with self.event_loop.watched():
            if shared is not None:
                publish(shared)
            try:
                yield
            finally:
                if timer is not None and shared is not None:
                    timer.cancel()
                    shared.write(self._values())

    async def exposition(self, accept: str) -> tuple[bytes, str]:
        """What a scraper that sends this Accept header gets, and its content type."""
        values = self._values()
        shared, process = self._shared, self._process
        if shared is None:
            families = [family(metric, values.get(metric, {})) for metric in catalogue.CATALOGUE]
            if process is not None:
                families += process.collect()
            return await asyncio.to_thread(exposition, families, accept)
        shared.write(values)
        return await asyncio.to_thread(lambda: exposition(shared.read(catalogue.CATALOGUE, values), accept))

    def _values(self) -> dict[Metric, dict[Labels, Value]]:
        return {
            catalogue.INFO: {(server_version(),): 1},
            catalogue.READY: {(): float(self._is_ready())},
            catalogue.WORKERS: {(): 1},
            catalogue.EVENT_LOOP_LAG: {(): self.event_loop.seconds},
            **self.requests.values(),
            **pool_values(self._models),
        }
