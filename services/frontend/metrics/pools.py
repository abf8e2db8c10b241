"""What each model's prompts, engines and links count, read when it is asked for."""

from collections import Counter
from collections.abc import Sequence
from typing import get_args

from services.frontend.engines.counts import Loss
from services.frontend.http.loaded_model import Engines, LoadedModel
from services.frontend.metrics import catalogue
from shared.metrics import Labels, Metric, Value

_STATES = ("connecting", "ready", "draining", "refused", "leaving")


def pool_values(models: Sequence[LoadedModel]) -> dict[Metric, dict[Labels, Value]]:
    """The values of every model, under its first name."""
    values: dict[Metric, dict[Labels, Value]] = {}
    for model in models:
        name = model.names[0]
        of_model = engine_values(name, model.engines)
        of_model[catalogue.TEMPLATE_SECONDS] = {(name,): model.prompts.template_seconds}
        of_model[catalogue.TOKENIZE_SECONDS] = {(name,): model.prompts.tokenize_seconds}
        for metric, by_labels in of_model.items():
            values.setdefault(metric, {}).update(by_labels)
    return values


def engine_values(name: str, engines: Engines) -> dict[Metric, dict[Labels, Value]]:
    """The values of one model's engines and links."""
    counts, link = engines.counts, engines.counts.link
    by_itself: dict[Metric, Value] = {
        catalogue.DETOKENIZE_SECONDS: counts.output_seconds,
        catalogue.ENGINES_READY: engines.num_ready,
        catalogue.GENERATIONS_IN_FLIGHT: engines.num_requests,
        catalogue.GENERATIONS_WITHOUT_ENGINE: engines.num_waiting,
        catalogue.HANDOVERS: counts.handovers,
        catalogue.OVERLOADS: counts.overloads,
        catalogue.GIVEN_UP: counts.given_up,
        catalogue.HANDSHAKE_FAILURES: counts.handshake_failures,
        catalogue.LINK_RECONNECTS: link.reconnects,
        catalogue.LINK_BLOCKED: engines.num_blocked,
        catalogue.MALFORMED_MESSAGES: link.malformed,
        catalogue.STALE_OUTPUTS: link.stale_outputs,
        **_loads(engines),
    }
    values: dict[Metric, dict[Labels, Value]] = {metric: {(name,): value} for metric, value in by_itself.items()}
    limits = engines.limits
    if limits is not None:
        values[catalogue.MODEL_INFO] = {(name, str(limits.max_model_len)): 1}
    states = Counter(status.state for status in engines.statuses())
    values[catalogue.ENGINES] = {(name, state): states[state] for state in _STATES}
    values[catalogue.FAILOVERS] = {(name, reason): counts.failover_reasons[reason] for reason in get_args(Loss)}
    values[catalogue.LINK_MESSAGES] = {(name, "in"): link.messages_in, (name, "out"): link.messages_out}
    values[catalogue.LINK_BYTES] = {(name, "in"): link.bytes_in, (name, "out"): link.bytes_out}
    return values


def _loads(engines: Engines) -> dict[Metric, Value]:
    """What the engines that serve last told of themselves."""
    serving = [status for status in engines.statuses() if status.state in ("ready", "draining", "leaving")]
    total = sum(status.kv_blocks_total for status in serving)
    free = sum(status.kv_blocks_free for status in serving)
    return {
        catalogue.POOL_REQUESTS_RUNNING: sum(status.running_requests for status in serving),
        catalogue.POOL_REQUESTS_WAITING: sum(status.waiting_requests for status in serving),
        catalogue.POOL_KV_USAGE: 1 - free / total if total else 0.0,
        catalogue.POOL_TOKENS_PER_SECOND: sum(status.tokens_per_second for status in serving),
    }
