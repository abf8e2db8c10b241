"""The engine's metrics, read from its own counts when they are asked for: a step pays only for one histogram."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.engine.core import EngineCore
from services.engine.link import Link

STEP_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


@dataclass(frozen=True, slots=True)
class Serving:
    """The parts of an engine whose model is loaded."""

    core: EngineCore
    link: Link


class EngineMetrics(Collector):
    """Metrics of one engine, in a registry of their own. `serving` is None until the model is loaded."""

    def __init__(self, serving: Callable[[], Serving | None]) -> None:
        self._serving = serving
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self._step_seconds = Histogram(
            "tandem_engine_step_seconds", "Seconds of one step.", buckets=STEP_BUCKETS, registry=self.registry
        )
        self.observe_step: Callable[[float], None] = self._step_seconds.observe

    def collect(self) -> Iterable[Metric]:
        """Called by the registry at every scrape, from the probes' threads."""
        serving = self._serving()
        if serving is None:
            return
        core, link = serving.core, serving.link
        counts = core.statistics
        for name, text, value in (
            ("requests_running", "Requests that the steps compute now.", len(core.scheduler.running)),
            ("requests_waiting", "Requests that wait for room.", len(core.scheduler.waiting)),
            ("kv_blocks_free", "KV blocks that no request uses.", core.num_free_blocks),
            ("kv_blocks", "KV blocks altogether.", core.num_blocks),
            ("frontends", "Frontends that are connected.", link.num_peers),
        ):
            yield GaugeMetricFamily(f"tandem_engine_{name}", text, value=value)
        for name, text, value in (
            ("generated_tokens", "Tokens that were sampled.", counts.generated_tokens),
            ("prompt_tokens", "Prompt tokens of requests that have output.", counts.prompt_tokens),
            ("cached_tokens", "Prompt tokens that the prefix cache held.", counts.cached_tokens),
            ("preemptions", "Requests that gave up their blocks and waited again.", counts.preemptions),
            ("malformed_messages", "Messages on the link that were dropped.", link.num_malformed),
        ):
            yield CounterMetricFamily(f"tandem_engine_{name}", text, value=value)
        finished = CounterMetricFamily("tandem_engine_requests_finished", "Ended requests.", labels=["reason"])
        for reason, count in list(counts.finished.items()):
            finished.add_metric([reason], count)
        yield finished
