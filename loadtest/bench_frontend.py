"""What one frontend process carries: streams at a set pace from simulated engines, over real sockets and HTTP.

    python -m loadtest.bench_frontend [--streams 64 256 1000] [--engines 1 2 4 8] [--step-ms 20] [--seconds 8]

Each cell: the streams run at 50 tokens/s each (`--step-ms` 20); over some seconds of the steady state, the tokens that
reached the clients, in all and by stream, the frontend's CPU time for each of them, and how long a token takes from
the end of the engine's step to the client's socket, as the kernel notes its arrival there. The engines' and the
clients' CPU time is shown too: on few cores they take from the frontend. How long a token then waits for the client to
read it is the client's own lateness: where that is long, the machine is saturated and no server is measured.
"""

import argparse
import itertools
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from loadtest.bench_result import RESULTS, table, write_json
from loadtest.simulated_fleet import Fleet, cpu_seconds, resident_bytes, running_fleet
from loadtest.stream_load import http_request, run_stream_load
from services.launcher.smollm2 import ensure_smollm2

NUM_STAMPS = 4096  # milliseconds; a token on its way for longer would seem younger than it is
MAX_TOKENS = 4000


@dataclass(slots=True)
class Cell:
    """One line of the table. Tokens a second; milliseconds; CPU microseconds."""

    streams: int
    engines: int
    step_ms: float
    generated_rate: float
    delivered_rate: float
    latency_median_ms: float
    latency_p99_ms: float
    latency_most_ms: float
    client_wait_p99_ms: float
    stream_median_rate: float
    stream_least_rate: float
    frontend_cpu_us: float  # for each delivered token
    frontend_cores: float
    engine_cpu_us: float  # of all engines, for each delivered token
    client_cores: float
    frontend_resident_mb: float
    load_average: float


def stamp_tokens(folder: Path) -> tuple[list[int], list[bytes]]:
    """Token ids whose text is a blank and letters, and those letters."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids: list[int] = []
    words: list[bytes] = []
    for token_id in range(tokenizer.get_vocab_size()):
        text = tokenizer.decode([token_id])
        if re.fullmatch(r" [a-zA-Z]+", text):
            ids.append(token_id)
            words.append(text[1:].encode())
            if len(ids) == NUM_STAMPS:
                return ids, words
    raise RuntimeError(f"the tokenizer in {folder} has too few words")


def measure(
    fleet: Fleet,
    streams: int,
    step_ms: float,
    seconds: float,
    words: list[bytes],
    *,
    tokens: int | None = None,
    burst: bool = False,
) -> Cell:
    body = {"model": "m", "prompt": [500] * 8, "max_tokens": tokens or MAX_TOKENS, "ignore_eos": True}
    processes = (fleet.frontend, *fleet.engines)
    cpu: list[list[float]] = []
    generated: list[float] = []
    times: list[float] = []

    def sample() -> None:
        times.append(time.monotonic())
        cpu.append([cpu_seconds(pid) for pid in processes])
        generated.append(fleet.generated_tokens())

    load = run_stream_load(
        fleet.port,
        http_request("/v1/completions", body),
        streams,
        seconds=seconds,
        # Where answers end within the measured time, as many begin at any moment as end.
        interval=1e-3 if tokens is None or burst else tokens * step_ms / 1e3 / streams,
        words=words,
        at_begin=sample,
        at_end=sample,
    )
    frontend, *engines = (end - start for start, end in zip(*cpu, strict=True))
    return Cell(
        streams=streams,
        engines=len(fleet.engines),
        step_ms=step_ms,
        generated_rate=(generated[1] - generated[0]) / (times[1] - times[0]),
        delivered_rate=load.tokens / load.seconds,
        latency_median_ms=load.age_median_ms,
        latency_p99_ms=load.age_p99_ms,
        latency_most_ms=load.age_most_ms,
        client_wait_p99_ms=load.wait_p99_ms,
        stream_median_rate=load.stream_median_tokens / load.seconds,
        stream_least_rate=load.stream_least_tokens / load.seconds,
        frontend_cpu_us=1e6 * frontend / load.tokens,
        frontend_cores=frontend / load.seconds,
        engine_cpu_us=1e6 * sum(engines) / load.tokens,
        client_cores=load.cpu_seconds / load.seconds,
        frontend_resident_mb=resident_bytes(fleet.frontend) / 1e6,
        load_average=os.getloadavg()[0],
    )


def as_table(cells: list[Cell]) -> str:
    header = (
        "engines|streams|step ms|generated tok/s|delivered tok/s|a stream's, median / slowest"
        "|way ms, median / p99 / most|frontend CPU µs/token|frontend cores|frontend MB|engines CPU µs/token"
        "|clients' cores|read after ms, p99"
    )
    rows = [
        (
            cell.engines,
            cell.streams,
            f"{cell.step_ms:g}",
            f"{cell.generated_rate:.0f}",
            f"{cell.delivered_rate:.0f}",
            f"{cell.stream_median_rate:.1f} / {cell.stream_least_rate:.1f}",
            f"{cell.latency_median_ms:.0f} / {cell.latency_p99_ms:.0f} / {cell.latency_most_ms:.0f}",
            f"{cell.frontend_cpu_us:.1f}",
            f"{cell.frontend_cores:.2f}",
            f"{cell.frontend_resident_mb:.0f}",
            f"{cell.engine_cpu_us:.1f}",
            f"{cell.client_cores:.2f}",
            f"{cell.client_wait_p99_ms:.1f}",
        )
        for cell in cells
    ]
    return table(header.split("|"), rows)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 256, 1000])
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument(
        "--step-ms", type=float, nargs="+", default=[20.0], help="of the engines; a token a stream each"
    )
    parser.add_argument(
        "--tokens", type=int, help="of an answer, after which its stream asks anew (by default none ends)"
    )
    parser.add_argument(
        "--burst", action="store_true", help="with --tokens: streams begin, and so end, a millisecond after each other"
    )
    parser.add_argument("--seconds", type=float, default=8.0, help="of the steady state that are measured (default 8)")
    parser.add_argument("--output", type=Path, default=RESULTS / "bench_frontend.json")
    options = parser.parse_args(arguments)

    folder = ensure_smollm2()
    ids, words = stamp_tokens(folder)
    cells: list[Cell] = []
    with tempfile.TemporaryDirectory(prefix="tandem-bench-") as scratch:
        stamp_file = Path(scratch) / "stamps.json"
        stamp_file.write_text(json.dumps(ids))
        for num_engines, step_ms in itertools.product(options.engines, options.step_ms):
            pace = {"simulated_step_ms": step_ms}
            with running_fleet(folder, Path(scratch), num_engines, pace, stamp_file=stamp_file) as fleet:
                for streams in options.streams:
                    print(f"{streams} streams, {num_engines} engines, {step_ms:g} ms …", file=sys.stderr, flush=True)
                    cell = measure(
                        fleet, streams, step_ms, options.seconds, words, tokens=options.tokens, burst=options.burst
                    )
                    cells.append(cell)
                    print(asdict(cell), file=sys.stderr, flush=True)
    print(as_table(cells))
    write_json(options.output, {"cells": [asdict(cell) for cell in cells]})
    return 0


if __name__ == "__main__":
    sys.exit(main())
