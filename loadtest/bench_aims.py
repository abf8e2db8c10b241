"""What the product aims at, next to what `make bench` measured: times and sizes, so of one machine."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from loadtest.bench_result import table

# Tokens a second over another server's, by prompts and concurrency, and its time to the first token over theirs.
RATES = {("short", 1): 2.0, ("short", 8): 1.7, ("short", 32): 1.5, ("long", 8): 1.3, ("long", 32): 1.3}
FIRST_TOKENS = {("long", 8): 0.7}
PACED_US = {64: 36.0, 256: 29.0}
SATURATED_US = 14.0
MANY_STREAMS = 1000


@dataclass(frozen=True, slots=True)
class Aim:
    """`measured` is to be `limit` at most, or at least."""

    what: str
    measured: float
    limit: float
    unit: str = ""
    at_least: bool = False

    @property
    def reached(self) -> bool:
        return self.measured >= self.limit if self.at_least else self.measured <= self.limit


def as_table(aims: Iterable[Aim]) -> str:
    """
    >>> print(as_table([Aim("start", 4.25, 10, " s"), Aim("rate", 1.2, 1.5, " times", at_least=True)]))
    | aim | wanted | measured |  |
    |---|---|---|---|
    | start | at most 10 s | 4.25 s | reached |
    | rate | at least 1.5 times | 1.20 times | **missed** |
    """
    rows = [
        (
            aim.what,
            f"at {'least' if aim.at_least else 'most'} {aim.limit:g}{aim.unit}",
            f"{_rounded(aim.measured)}{aim.unit}",
            "reached" if aim.reached else "**missed**",
        )
        for aim in aims
    ]
    return table(["aim", "wanted", "measured", ""], rows)


def _rounded(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def serve_aims(result: Any) -> list[Aim]:
    """Beside any other server but transformers, which is a library; and memory."""
    cells = {(cell["server"], cell["prompt"], cell["concurrency"]): cell for cell in result["cells"]}
    aims: list[Aim] = []
    for (server, *of), cell in cells.items():
        if server in ("Tandem", "transformers"):
            continue
        prompt, concurrency = of
        own, where = cells["Tandem", prompt, concurrency], f"{server}'s, {prompt} prompts at {concurrency}"
        if (wanted := RATES.get((prompt, concurrency))) is not None:
            rate = own["tokens_per_second"] / cell["tokens_per_second"]
            aims.append(Aim(f"tokens/s over {where}", rate, wanted, " times", at_least=True))
        first = own["first_token_median_ms"] / cell["first_token_median_ms"]
        aims.append(
            Aim(f"time to first token over {where}", first, FIRST_TOKENS.get((prompt, concurrency), 1), " times")
        )
    memory = result["engine_memory"]
    peak = memory["peak_mb"] / (memory["weights_mb"] + memory["kv_cache_mb"])
    return [*aims, Aim("engine's most memory over weights and KV cache", peak, 1.3, " times")]


def stream_cost_aims(result: Any) -> list[Aim]:
    """Beside any other frontend too, of those that do all the work."""
    costs = {(cell["server"], cell["pace"], cell["streams"]): cell["chunk_us"] for cell in result["cells"]}
    aims: list[Aim] = []
    for (server, pace, streams), cost in costs.items():
        own, where = costs["Tandem", pace, streams], f"{pace} at {streams} streams"
        limit = PACED_US.get(streams) if pace == "paced" else SATURATED_US
        if server == "Tandem" and limit is not None:
            aims.append(Aim(f"frontend's CPU a chunk, {where}", cost, limit, " µs"))
        elif server != "Tandem" and "constant" not in server:
            aims.append(Aim(f"frontend's CPU a chunk over {server}'s, {where}", own / cost, 1, " times"))
    aims += [
        Aim("frontend's CPU a request besides its chunks", cost, 640, " µs")
        for server, cost in result["request_us"].items()
        if server == "Tandem"
    ]
    return aims


def frontend_aims(result: Any) -> list[Aim]:
    cells = [cell for cell in result["cells"] if cell["streams"] == MANY_STREAMS]
    aims = [
        Aim(
            f"99th percentile of a token's way, {MANY_STREAMS} streams, engines: {cell['engines']}",
            cell["latency_p99_ms"],
            50,
            " ms",
        )
        for cell in cells
    ]
    if cells:
        most = max(cell["frontend_resident_mb"] for cell in cells)
        aims.append(Aim(f"frontend's memory at {MANY_STREAMS} streams", most, 250, " MB"))
    return aims


def loop_lag_aims(result: Any) -> list[Aim]:
    most = max(cell["within_ms"] for cell in result)
    return [Aim("longest lag of the event loop beside prompts of 8,000 tokens (a bucket's bound)", most, 5, " ms")]


def engine_step_aims(result: Any) -> list[Aim]:
    outside = max(step["outside"] for step in result["steps"] if step["mix"] == "mixed")
    return [
        Aim("a step of one request over reading its weights", result["floor"]["times"], 1.4, " times"),
        Aim("share of a mixed step outside the model", 100 * outside, 15, "%"),
    ]


def engine_overhead_aims(result: Any) -> list[Aim]:
    most = max(step["overhead"] for step in result["steps"].values())
    return [Aim(f"engine's step at {result['requests']} requests besides the model", most, 2, " ms")]


def start_aims(result: Any) -> list[Aim]:
    return [Aim("from `tandem serve` to the first token", result["first"], 10, " s")]


def structured_aims(result: Any) -> list[Aim]:
    return [Aim("rate with a schema over that without", 100 * result["ratio"], 95, "%", at_least=True)]


AIMS: dict[str, Callable[[Any], list[Aim]]] = {
    "serve": serve_aims,
    "start": start_aims,
    "engine_step": engine_step_aims,
    "engine_overhead": engine_overhead_aims,
    "structured": structured_aims,
    "stream_cost": stream_cost_aims,
    "frontend": frontend_aims,
    "loop_lag": loop_lag_aims,
}
