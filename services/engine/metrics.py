"""The engine's metrics, read from its own counts when they are asked for. A step pays for a few histograms."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from services.engine import metric_catalogue as catalogue
from services.engine.core import EngineCore
from services.engine.link import Link
from services.engine.mailbox import Inbox
from services.engine.settings import EngineSettings
from shared.metrics import Labels, Metric, Value, exposition, family
from shared.protocol import FinishReason
from shared.version import server_version

_REFUSALS = ("overloaded", "invalid", "draining", "quarantined")
_ENDS = (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT, FinishReason.ERROR, FinishReason.HANDED_OVER)

Values = dict[Metric, dict[Labels, Value]]


@dataclass(frozen=True, slots=True)
class Serving:
    """The parts of an engine whose model is loaded."""

    core: EngineCore
    link: Link
    inbox: Inbox


class EngineMetrics(Collector):
    """Metrics of one engine. `serving` is None until the model is loaded; `not_ready` is the probe's verdict."""

    def __init__(
        self, settings: EngineSettings, serving: Callable[[], Serving | None], not_ready: Callable[[], str | None]
    ) -> None:
        self._executor = settings.executor
        self._serving = serving
        self._not_ready = not_ready
        self._step_seconds = catalogue.STEP_SECONDS.distribution()
        self.observe_step: Callable[[float], None] = self._step_seconds.observe
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._registry.register(self)

    def exposition(self, accept: str) -> tuple[bytes, str]:
        """What a scraper that sends this Accept header gets, and its content type. From any thread."""
        return exposition(self._registry.collect(), accept)

    def collect(self) -> Iterable[Family]:
        values: Values = {catalogue.READY: {(): float(self._not_ready() is None)}}
        serving = self._serving()
        if serving is not None:
            values |= self._engine(serving.core) | self._steps(serving) | self._link(serving)
        return [family(metric, values.get(metric, {})) for metric in catalogue.CATALOGUE]

    def describe(self) -> Iterable[Family]:
        return []

    def _engine(self, core: EngineCore) -> Values:
        description, scheduler, counts = core.description, core.scheduler, core.statistics
        free, total = core.num_free_blocks, core.num_blocks
        return {
            catalogue.INFO: {(server_version(), description.name, description.fingerprint, self._executor): 1},
            catalogue.KV_CACHE_INFO: {(str(core.limits.block_size), str(total)): 1},
            catalogue.REQUESTS_RUNNING: {(): len(scheduler.running)},
            catalogue.REQUESTS_WAITING: {(): len(scheduler.waiting)},
            catalogue.REQUESTS_PREPARING: {(): len(core.pending_grammars)},
            catalogue.WAITING_TOKENS: {(): scheduler.uncomputed_tokens},
            catalogue.REQUESTS_RECEIVED: {(): counts.received},
            catalogue.REQUESTS_REFUSED: {(reason,): counts.refused.get(reason, 0) for reason in _REFUSALS},
            catalogue.REQUESTS_FINISHED: {
                (name,): counts.finished.get(name, 0) for name in (reason.name.lower() for reason in _ENDS)
            },
            catalogue.QUEUE_SECONDS: {(): counts.queue_seconds},
            catalogue.PREFILL_SECONDS: {(): counts.prefill_seconds},
            catalogue.PROMPT_TOKENS: {(): counts.prompt_tokens},
            catalogue.CACHED_TOKENS: {(): counts.cached_tokens},
            catalogue.GENERATED_TOKENS: {(): counts.generated_tokens},
            catalogue.PREFIX_QUERIED_TOKENS: {(): counts.prefix_queried_tokens},
            catalogue.PREFIX_HIT_TOKENS: {(): counts.prefix_hit_tokens},
            catalogue.KV_BLOCKS: {(): total},
            catalogue.KV_BLOCKS_FREE: {(): free},
            catalogue.KV_BLOCKS_CACHED: {(): core.num_cached_blocks},
            catalogue.KV_USAGE: {(): 1 - free / total},
            catalogue.PREEMPTIONS: {(): counts.preemptions},
        }

    def _steps(self, serving: Serving) -> Values:
        counts = serving.core.statistics
        phases: dict[Labels, Value] = {(phase,): seconds for phase, seconds in counts.phases.items()}
        phases["send",] = serving.link.send_seconds
        return {
            catalogue.STEP_SECONDS: {(): self._step_seconds},
            catalogue.STEP_PHASE_SECONDS: phases,
            catalogue.BATCH_REQUESTS: {(): counts.batch_requests},
            catalogue.BATCH_TOKENS: {(): counts.batch_tokens},
        }

    @staticmethod
    def _link(serving: Serving) -> Values:
        link, counts = serving.link, serving.link.counts
        backlog_messages, backlog_bytes = link.peers.backlog
        return {
            catalogue.FRONTENDS: {(): len(link.peers)},
            catalogue.FRONTENDS_LOST: {(): link.peers.num_lost},
            catalogue.LINK_MESSAGES: {("in",): counts.messages_in, ("out",): counts.messages_out},
            catalogue.LINK_BYTES: {("in",): counts.bytes_in, ("out",): counts.bytes_out},
            catalogue.LINK_RECONNECTS: {(): link.peers.num_reconnects},
            catalogue.LINK_QUEUE: {
                ("inbox",): len(serving.inbox),
                ("outbox",): link.outbox_length,
                ("backlog",): backlog_messages,
            },
            catalogue.LINK_BACKLOG_BYTES: {(): backlog_bytes},
            catalogue.MALFORMED_MESSAGES: {(): link.num_malformed},
            catalogue.HANDSHAKE_FAILURES: {(reason,): count for reason, count in link.handshake_failures.items()},
        }
