"""Goodput at capacity and at a multiple of it: what is refused must cost the others nothing.

    python -m loadtest.bench_overload [--times 1 3] [--seconds 20]

Two frontends and two simulated engines, whose steps take a set time so that the CPU is not what limits them. Requests
come at an even pace whether or not others are answered (an open loop), and whoever is refused does not come again.
Goodput is the tokens a second of answers that were whole within the deadline. Exits with 1 where the goodput at the
highest load is more than a tenth below that at the lowest.
"""

import argparse
import asyncio
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from loadtest.bench_result import RESULTS, table, write_json
from loadtest.bench_serve import percentile
from loadtest.server_process import tandem_serve
from loadtest.stream_client import RequestFailed, timed_completion

NUM_ENGINES = 2
SLOTS = 16  # requests that an engine runs at once
WAITING = 32  # and that wait there
STEP_SECONDS = 0.05
OUTPUT_TOKENS = 20
DEADLINE = 5.0  # seconds
WARM_UP = 4.0
# A step's own time, and the one step that a prompt takes before its first token is out, are in the steps.
REQUESTS_PER_SECOND = NUM_ENGINES * SLOTS / (OUTPUT_TOKENS * STEP_SECONDS)
TOLERATED_LOSS = 0.1


@dataclass(slots=True)
class Level:
    """One load. Rates a second, times in seconds."""

    times_capacity: float
    offered_requests: float
    goodput_tokens: float
    finished: int
    refused: int
    other_failures: int
    latency_median: float
    latency_p99: float
    refusal_p99: float


async def run(port: int, times_capacity: float, seconds: float) -> Level:
    rng = random.Random(0)
    rate = times_capacity * REQUESTS_PER_SECOND
    outcomes: Counter[str] = Counter()
    ends: list[tuple[float, float]] = []  # of good answers: when each ended, and how long it took
    refusals: list[float] = []

    async def request() -> None:
        body = {
            "model": "SmolLM2-135M-Instruct",
            "prompt": [rng.randrange(100, 40_000) for _ in range(16)],
            "max_tokens": OUTPUT_TOKENS,
            "timeout": DEADLINE,
        }
        began = time.perf_counter()
        try:
            timing = await timed_completion("127.0.0.1", port, body)
        except RequestFailed as failure:
            refused = "429" in str(failure)[:20]
            if refused and "retry-after" not in str(failure).lower():
                raise RuntimeError(f"a refusal without Retry-After: {failure}") from failure
            outcomes["refused" if refused else "failed"] += 1
            if refused:
                refusals.append(time.perf_counter() - began)
            return
        outcomes["finished"] += 1
        if timing.seconds <= DEADLINE:
            ends.append((time.perf_counter(), timing.seconds))

    started = time.perf_counter()
    async with asyncio.TaskGroup() as requests:
        for number in range(int(rate * (WARM_UP + seconds))):
            await asyncio.sleep(max(0.0, started + number / rate - time.perf_counter()))
            requests.create_task(request())
    window = started + WARM_UP, started + WARM_UP + seconds
    good = [took for end, took in ends if window[0] <= end < window[1]]
    return Level(
        times_capacity=times_capacity,
        offered_requests=rate,
        goodput_tokens=len(good) * OUTPUT_TOKENS / seconds,
        finished=outcomes["finished"],
        refused=outcomes["refused"],
        other_failures=outcomes["failed"],
        latency_median=percentile(good, 50),
        latency_p99=percentile(good, 99),
        refusal_p99=percentile(refusals, 99) if refusals else 0.0,
    )


def as_table(levels: list[Level]) -> str:
    header = (
        "offered, of capacity|requests/s|goodput tok/s|finished|refused (429)|failed|answer s, median / p99"
        "|refusal ms, p99"
    )
    rows = [
        (
            f"{level.times_capacity:g}",
            f"{level.offered_requests:.0f}",
            f"{level.goodput_tokens:.0f}",
            level.finished,
            level.refused,
            level.other_failures,
            f"{level.latency_median:.2f} / {level.latency_p99:.2f}",
            f"{1e3 * level.refusal_p99:.0f}",
        )
        for level in levels
    ]
    return table(header.split("|"), rows)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=float, nargs="+", default=[1.0, 3.0], help="loads, in capacities (default 1 3)")
    parser.add_argument("--seconds", type=float, default=20.0, help="measured at each load (default 20)")
    parser.add_argument("--output", type=Path, default=RESULTS / "bench_overload.json")
    options = parser.parse_args(arguments)
    flags = {
        "--executor": "simulated",
        "--simulated-step-ms": str(1000 * STEP_SECONDS),
        "--engines": str(NUM_ENGINES),
        "--frontends": "2",
        "--max-num-seqs": str(SLOTS),
        "--max-waiting-requests": str(WAITING),
        "--log-level": "warning",
    }
    levels: list[Level] = []
    with (
        tempfile.TemporaryDirectory(prefix="tandem-bench-") as scratch,
        tandem_serve(Path(scratch), *(word for flag in flags.items() for word in flag)) as server,
    ):
        for times_capacity in sorted(options.times):
            print(f"{times_capacity:g} times the capacity …", file=sys.stderr, flush=True)
            levels.append(asyncio.run(run(server.port, times_capacity, options.seconds)))
    print(as_table(levels))
    ratio = levels[-1].goodput_tokens / levels[0].goodput_tokens
    print(
        f"\nGoodput at {levels[-1].times_capacity:g} times the capacity is {ratio:.2f} of that at "
        f"{levels[0].times_capacity:g}."
    )
    write_json(options.output, {"load_average": os.getloadavg()[0], "levels": [asdict(level) for level in levels]})
    return int(ratio < 1 - TOLERATED_LOSS)


if __name__ == "__main__":
    sys.exit(main())
