"""What tracing costs at a sampling of 1%: a frontend with it beside one without, and engines alike.

    python -m loadtest.bench_tracing [--rounds 20] [--requests 300] [--tokens 100] [--ratio 0.01] [--keep-failures]

Both of each pair run at the same time and are measured in turns, so that the machine's moods meet them alike; what is
said is the median over the rounds of on / off. The frontend's cost is the CPU time of its process, which bounds what it
carries; that of its engine's loop is the time of its steps with a simulated model that takes no time at all, so that
it is a share of the engine's own work alone. Spans go to a receiver on loopback.
"""

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from loadtest.server_process import tandem_serve
from loadtest.stream_client import run_closed_loop
from services.engine.core import EngineCore
from services.engine.executor.simulated import SimulatedExecutor
from services.engine.settings import EngineSettings
from services.engine.timelines import Timelines
from services.launcher.smollm2 import NAME as MODEL
from shared.protocol import Add, pack_token_ids
from shared.sampling_params import SamplingParams
from shared.span_export import SpanExport
from shared.tracing import TraceContext, new_span_id, new_trace_id

CONCURRENCY = 32
ENGINE_REQUESTS = 64
ENGINE_TOKENS = 100
STEPS_PER_TURN = 50
PEER = b"frontend"


@contextlib.contextmanager
def receiver() -> Iterator[str]:
    """Takes everything and keeps nothing."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()


@dataclass(slots=True)
class Side:
    """One of a pair, over the rounds."""

    cpu_ms: list[float] = field(default_factory=list)  # of the frontend, for each request
    rate: list[float] = field(default_factory=list)  # requests/s


def cpu_seconds(pid: int) -> float:
    """What the process's threads have used; to the nanosecond, where its clock counts in hundredths."""
    files = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(file.read_text().split()[0]) for file in files) / 1e9


def compare_frontends(arguments: argparse.Namespace, endpoint: str, scratch: Path) -> dict[str, Side]:
    on = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": endpoint,
        "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
        "OTEL_TRACES_SAMPLER_ARG": str(arguments.ratio),
        "TANDEM_TRACE_ERRORS": str(arguments.keep_failures).lower(),
    }
    flags = ("--executor", "simulated", "--log-level", "warning")
    sides = {"off": Side(), "on": Side()}
    prompt = "One two three four five six seven eight nine ten. " * 8
    body: dict[str, Any] = {"model": MODEL, "prompt": prompt, "max_tokens": arguments.tokens, "ignore_eos": True}
    with (
        tandem_serve(scratch / "off", *flags, environment={"OTEL_SDK_DISABLED": "true"}) as without,
        tandem_serve(scratch / "on", *flags, environment=on) as with_tracing,
    ):
        servers = {"off": without, "on": with_tracing}
        for round_number in range(-1, arguments.rounds):
            for name in ("off", "on") if round_number % 2 else ("on", "off"):
                server = servers[name]
                frontend = server.frontends[0]["pid"]
                before, began = cpu_seconds(frontend), time.perf_counter()
                asyncio.run(run_closed_loop("127.0.0.1", server.port, [body] * arguments.requests, CONCURRENCY))
                seconds = time.perf_counter() - began
                if round_number >= 0:  # the first is to get warm
                    sides[name].cpu_ms.append(1000 * (cpu_seconds(frontend) - before) / arguments.requests)
                    sides[name].rate.append(arguments.requests / seconds)
    return sides


class SteppedEngine:
    """A core that always has as many requests; of those that come, `ratio` are sampled, and their spans exported."""

    def __init__(self, model: Path, tracing: SpanExport | None, ratio: float) -> None:
        values: dict[str, Any] = {
            "model": str(model),
            "executor": "simulated",
            "max_num_seqs": ENGINE_REQUESTS,
            "num_kv_blocks": 4096,
        }
        settings = EngineSettings(**values)
        self._core = EngineCore(SimulatedExecutor(settings), settings)
        self._tracing = tracing
        if tracing is not None:
            self._core.timelines = Timelines(tracing.samples)
        self._every = max(1, round(1 / ratio))
        self._ids = 0
        for number in range(ENGINE_REQUESTS):
            self._add(max_tokens=1 + number * ENGINE_TOKENS // ENGINE_REQUESTS)

    def _add(self, max_tokens: int = ENGINE_TOKENS) -> None:
        self._ids += 1
        context: list[str] = []
        if self._tracing is not None and self._ids % self._every == 0:
            context = TraceContext(new_trace_id(), new_span_id(), True).as_w3c()
        prompt = [(self._ids * 31 + position) % 40_000 + 100 for position in range(100)]
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        self._core.add(PEER, Add(self._ids, pack_token_ids(prompt), sampling, trace_context=context))

    def turn(self) -> float:
        """Seconds of one step, over some of them. The spans' export counts as if it were the loop's."""
        core = self._core
        began = time.perf_counter()
        for _ in range(STEPS_PER_TURN):
            outputs = core.step()
            if core.timelines.finished and self._tracing is not None:
                self._tracing.export(core.timelines.take_finished())
            for output in outputs.get(PEER, ()):
                if output.finish_reason is not None:
                    self._add()
        return (time.perf_counter() - began) / STEPS_PER_TURN


def compare_steps(rounds: int, ratio: float, folder: Path) -> tuple[list[float], list[float]]:
    """Microseconds a step, off and on."""
    config = {"vocab_size": 49_152, "max_position_embeddings": 4096, "eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps(config))
    tracing = SpanExport("engine")
    engines = [SteppedEngine(folder, None, ratio), SteppedEngine(folder, tracing, ratio)]
    times: list[list[float]] = [[], []]
    for number in range(-20, rounds):
        for side in (0, 1) if number % 2 else (1, 0):
            seconds = engines[side].turn()
            if number >= 0:
                times[side].append(1e6 * seconds)
    tracing.close()
    return times[0], times[1]


def ratio_of(on: list[float], off: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(on, off, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="Of each frontend.")
    parser.add_argument("--requests", type=int, default=300, help="Of one round.")
    parser.add_argument("--tokens", type=int, default=100, help="Of one answer.")
    parser.add_argument("--ratio", type=float, default=0.01, help="Of requests that are sampled.")
    parser.add_argument("--keep-failures", action="store_true", help="As --trace-errors does.")
    parser.add_argument("--turns", type=int, default=400, help=f"Of {STEPS_PER_TURN} steps of each engine.")
    arguments = parser.parse_args()
    with receiver() as endpoint, tempfile.TemporaryDirectory() as folder:
        os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = endpoint
        off, on = compare_steps(arguments.turns, arguments.ratio, Path(folder))
        print(
            f"engine, {ENGINE_REQUESTS} requests, no model: {statistics.median(off):.1f} µs a step off, "
            f"{statistics.median(on):.1f} on; means {statistics.mean(off):.1f} and {statistics.mean(on):.1f}; "
            f"on / off {ratio_of(on, off):.4f} (median of {len(on)} turns)",
            flush=True,
        )
        sides = compare_frontends(arguments, endpoint, Path(folder))
    off_side, on_side = sides["off"], sides["on"]
    print(
        f"frontend, {arguments.tokens} tokens a request: CPU ms {statistics.median(off_side.cpu_ms):.3f} off, "
        f"{statistics.median(on_side.cpu_ms):.3f} on; on / off {ratio_of(on_side.cpu_ms, off_side.cpu_ms):.4f}\n"
        f"closed loop of {CONCURRENCY}: {statistics.median(off_side.rate):.1f} requests/s off, "
        f"{statistics.median(on_side.rate):.1f} on; on / off {ratio_of(on_side.rate, off_side.rate):.4f} "
        f"(medians of {arguments.rounds} rounds)"
    )


if __name__ == "__main__":
    main()
