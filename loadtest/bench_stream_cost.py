"""What a streamed chunk costs the frontend's process, next to servers that do nothing but send one constant chunk.

    python -m loadtest.bench_stream_cost [--rounds 3] [--streams 64 256] [--peer NAME PACE PORT PID]

Chat answers of 256 tokens, one a chunk, from a simulated engine: paced (5.8 ms a step) and saturated (no delay at
all). CPU microseconds of the server's process for each chunk that reached a client, everything included: template,
tokenizing, routing, link, detokenizing, JSON, HTTP. The servers take turns in one run; medians of the rounds. `--peer`
adds a server that runs already, with an engine of that pace behind it: `--peer dynamo paced 9201 1234`.
"""

import argparse
import contextlib
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from loadtest.bench_result import RESULTS, table, write_json
from loadtest.server_process import ROOT
from loadtest.simulated_fleet import cpu_seconds, running_fleet
from loadtest.stream_load import http_request, run_stream_load
from services.launcher.smollm2 import ensure_smollm2

TANDEM = "Tandem"
TOKENS = 256
STEP_MS = 5.8
PACES: dict[str, dict[str, object]] = {
    "paced": {"simulated_step_ms": STEP_MS},
    "saturated": {"simulated_accelerator": "instant"},
}
MESSAGES = [{"role": "user", "content": "Tell me a story about the sea, the wind, and a ship that never came home."}]


@dataclass(slots=True)
class Server:
    """One process under load."""

    name: str
    pace: str
    port: int
    pid: int


@dataclass(slots=True)
class Cell:
    """One server under one load: medians of the rounds."""

    server: str
    pace: str
    streams: int
    chunk_us: float
    token_us: float
    chunks_per_read: float
    client_us: float
    tokens_per_second: float
    rounds: list[float]


@contextlib.contextmanager
def constant_server(name: str, app: str, pace: str) -> Iterator[Server]:
    """One of constant_stream's, in uvicorn with the event loop and the parser of the frontend."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "uvicorn", f"loadtest.constant_stream:{app}", "--port", str(port)]
    command += ["--loop", "uvloop", "--http", "httptools", "--lifespan", "off", "--no-access-log"]
    environment = os.environ | {"TANDEM_BENCH_PAUSE": str(STEP_MS / 1e3 if pace == "paced" else 0)}
    process = subprocess.Popen([*command, "--log-level", "error"], cwd=ROOT, env=environment)
    try:
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the constant server {name} did not start")
            time.sleep(0.05)
        yield Server(name, pace, port, process.pid)
    finally:
        process.kill()
        process.wait()


@dataclass(slots=True)
class Sample:
    """One run against one server."""

    chunk_us: float
    token_us: float
    chunks_per_read: float
    client_us: float
    tokens_per_second: float
    answer_us: float


def run(server: Server, streams: int, answers: int, tokens: int = TOKENS) -> Sample:
    body = {"model": "m", "messages": MESSAGES, "max_tokens": tokens, "ignore_eos": True}
    cpu: list[float] = []
    load = run_stream_load(
        server.port,
        http_request("/v1/chat/completions", body),
        streams,
        answers=answers,
        at_begin=lambda: cpu.append(cpu_seconds(server.pid)),
        at_end=lambda: cpu.append(cpu_seconds(server.pid)),
    )
    used = 1e6 * (cpu[1] - cpu[0])
    return Sample(
        used / load.chunks,
        used / (load.answers * tokens),
        load.chunks / load.reads,
        1e6 * load.cpu_seconds / load.chunks,
        load.answers * tokens / load.seconds,
        used / load.answers,
    )


def measure(servers: Sequence[Server], streams: int, rounds: int) -> list[Cell]:
    """Each server in turn, `rounds` times, after a round that warms them up."""
    samples: dict[str, list[Sample]] = {server.name: [] for server in servers}
    for server in servers:
        run(server, streams, streams)
    for _ in range(rounds):
        for server in servers:
            samples[server.name].append(run(server, streams, 2 * streams))
    return [_cell(server, streams, samples[server.name]) for server in servers]


def _cell(server: Server, streams: int, samples: Sequence[Sample]) -> Cell:
    return Cell(
        server.name,
        server.pace,
        streams,
        chunk_us=statistics.median(sample.chunk_us for sample in samples),
        token_us=statistics.median(sample.token_us for sample in samples),
        chunks_per_read=statistics.median(sample.chunks_per_read for sample in samples),
        client_us=statistics.median(sample.client_us for sample in samples),
        tokens_per_second=statistics.median(sample.tokens_per_second for sample in samples),
        rounds=[sample.chunk_us for sample in samples],
    )


def request_cost(server: Server, chunk_us: float, rounds: int) -> float:
    """CPU microseconds of a request besides its chunks (role, text, finish and [DONE] of an answer of one token)."""
    costs = [run(server, 16, 600, tokens=1).answer_us - 4 * chunk_us for _ in range(rounds + 1)]
    return statistics.median(costs[1:])


def as_table(cells: list[Cell]) -> str:
    header = "pace|streams|server|CPU µs/chunk|CPU µs/token|chunks a read|client µs/chunk|tokens/s"
    rows = [
        (
            cell.pace,
            cell.streams,
            f"**{cell.server}**" if cell.server == TANDEM else cell.server,
            *(f"{value:.1f}" for value in (cell.chunk_us, cell.token_us, cell.chunks_per_read, cell.client_us)),
            f"{cell.tokens_per_second:.0f}",
        )
        for cell in cells
    ]
    return table(header.split("|"), rows)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--pace", nargs="+", choices=list(PACES), default=list(PACES))
    parser.add_argument("--peer", nargs=4, action="append", default=[], metavar=("NAME", "PACE", "PORT", "PID"))
    parser.add_argument("--output", type=Path, default=RESULTS / "bench_stream_cost.json")
    options = parser.parse_args(arguments)

    folder = ensure_smollm2()
    cells: list[Cell] = []
    per_request: dict[str, float] = {}
    for pace in options.pace:
        with contextlib.ExitStack() as running:
            scratch = Path(running.enter_context(tempfile.TemporaryDirectory(prefix="tandem-bench-")))
            fleet = running.enter_context(running_fleet(folder, scratch, 1, PACES[pace]))
            servers = [
                Server(TANDEM, pace, fleet.port, fleet.frontend),
                running.enter_context(constant_server("constant, plain ASGI", "plain", pace)),
                running.enter_context(constant_server("constant, FastAPI", "fastapi", pace)),
            ]
            servers += [Server(name, pace, int(port), int(pid)) for name, of, port, pid in options.peer if of == pace]
            for streams in options.streams:
                print(f"{pace}, {streams} streams …", file=sys.stderr, flush=True)
                cells += measure(servers, streams, options.rounds)
            if pace == "saturated":
                for server in servers:
                    if "constant" not in server.name:
                        chunk = min(cell.chunk_us for cell in cells if (cell.server, cell.pace) == (server.name, pace))
                        per_request[server.name] = request_cost(server, chunk, options.rounds)
    print(as_table(cells))
    for name, cost in per_request.items():
        print(f"\nA request to {name} costs {cost:.0f} µs besides its chunks.")
    write_json(options.output, {"cells": [asdict(cell) for cell in cells], "request_us": per_request})
    return 0


if __name__ == "__main__":
    sys.exit(main())
