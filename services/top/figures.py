"""What changed between two looks: rates, and quantiles of the histograms' growth. `screen` shows them."""

import math
from dataclasses import dataclass

from services.top.reading import Reading

REQUESTS = "tandem_frontend_requests_total"
FIRST_TOKEN = "gen_ai_server_time_to_first_token_seconds"
EACH_TOKEN = "gen_ai_server_time_per_output_token_seconds"
STREAM_ERRORS = "tandem_frontend_stream_errors_total"
FAILOVERS = "tandem_frontend_failovers_total"
_ROUTES = ("/v1/chat/completions", "/v1/completions")


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds, or NaN where nothing was counted."""

    median: float
    p99: float


@dataclass(frozen=True, slots=True)
class Figures:
    """Rates are a second, of the completions' routes alone; counts of failovers are of the whole window."""

    seconds: float
    requests: float
    refused: float  # 429 and 503
    failed: float  # other 5xx, and errors in the stream
    abandoned: float
    in_flight: int
    streaming: int
    failovers: int
    first_token: Latency
    each_token: Latency


def figures(earlier: Reading, later: Reading) -> Figures:
    """Of two looks at the same frontends. A counter that fell (its process is new) counts from nought."""
    seconds = max(later.at - earlier.at, 1e-9)
    by_status = _growth(_statuses(earlier), _statuses(later))

    def rate(*prefixes: str) -> float:
        return sum(count for status, count in by_status.items() if status.startswith(prefixes)) / seconds

    return Figures(
        seconds=seconds,
        requests=sum(by_status.values()) / seconds,
        refused=rate("429", "503"),
        failed=rate("5") - rate("503") + _increase(STREAM_ERRORS, "reason", earlier, later) / seconds,
        abandoned=rate("499"),
        in_flight=round(later.total("tandem_frontend_requests_in_flight")),
        streaming=round(later.total("tandem_frontend_streams_in_flight")),
        failovers=round(_increase(FAILOVERS, "model", earlier, later)),
        first_token=_latency(FIRST_TOKEN, earlier, later),
        each_token=_latency(EACH_TOKEN, earlier, later),
    )


def _statuses(reading: Reading) -> dict[str, float]:
    counts: dict[str, float] = {}
    for labels, value in reading.samples.get(REQUESTS, {}).items():
        names = dict(labels)
        if names.get("route") in _ROUTES:
            status = names.get("status", "")
            counts[status] = counts.get(status, 0.0) + value
    return counts


def _increase(name: str, label: str, earlier: Reading, later: Reading) -> float:
    return sum(_growth(earlier.by(name, label), later.by(name, label)).values())


def _growth(earlier: dict[str, float], later: dict[str, float]) -> dict[str, float]:
    fell = any(later.get(key, 0.0) < value for key, value in earlier.items())
    return {key: value - (0.0 if fell else earlier.get(key, 0.0)) for key, value in later.items()}


def _latency(name: str, earlier: Reading, later: Reading) -> Latency:
    buckets = _growth(earlier.by(name + "_bucket", "le"), later.by(name + "_bucket", "le"))
    return Latency(quantile(0.5, buckets), quantile(0.99, buckets))


def quantile(share: float, buckets: dict[str, float]) -> float:
    """As PromQL's histogram_quantile: linear inside the bucket, the last finite bound above it. NaN of nothing.

    `buckets` are cumulative counts by their upper bound, +Inf included."""
    bounds = sorted((float(bound), count) for bound, count in buckets.items())
    if not bounds or bounds[-1][1] <= 0:
        return math.nan
    rank = share * bounds[-1][1]
    below, count_below = 0.0, 0.0
    for bound, count in bounds:
        if count >= rank and count > count_below:
            if math.isinf(bound):
                return below
            return below + (bound - below) * (rank - count_below) / (count - count_below)
        below, count_below = bound, count
    return below
