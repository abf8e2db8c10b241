"""What metrics and traces cost: frontends with and without them, side by side, and the engine's own part of a step.

    python -m loadtest.bench_metrics [--rounds 6] [--requests 500] [--streams 64]

Frontend processes in three states (nothing counted, metrics, metrics and traces sampled at 1% whose collector is away)
take turns with the same load on one simulated engine; each number is the frontend's CPU time, the mean of the quicker
half of the rounds. The engine's part is measured in this process, steps with and without counting in turns.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx

from loadtest.server_process import ROOT, tandem_serve
from services.engine.core import EngineCore
from services.engine.executor.simulated import SimulatedExecutor
from services.engine.settings import EngineSettings
from services.engine.statistics import Statistics
from services.frontend.engines.counts import DispatchCounts
from services.frontend.generation import Generation
from services.frontend.http.choices import Choices
from services.frontend.http.usage import Usage
from services.frontend.metrics.request_record import Generated
from services.frontend.metrics.requests import Outcome, RequestMetrics
from services.frontend.output.collector import Collector, Delta
from services.launcher.smollm2 import ensure_smollm2
from shared.metrics import Distribution
from shared.protocol import Add, pack_token_ids
from shared.sampling_params import SamplingParams

MODEL = "m"
TOKENS_OF_REQUEST, TOKENS_OF_STREAM = 8, 400
# Run first in the frontend that counts nothing.
_UNCOUNTED = """
import contextlib
from services.frontend.metrics.event_loop import EventLoopLag
from services.frontend.metrics.requests import RequestMetrics
from shared.metrics import Distribution
EventLoopLag.watched = lambda self: contextlib.nullcontext()
RequestMetrics.ended = lambda self, outcome, generated, started: None
Distribution.observe = lambda self, value: None
"""
_TRACED = {
    "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9",
    "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
    "OTEL_TRACES_SAMPLER_ARG": "0.01",
}
STATES = {"nothing": (_UNCOUNTED, {}), "metrics": ("", {}), "metrics, traces 1%": ("", _TRACED)}


@dataclass(frozen=True, slots=True)
class Frontend:
    url: str
    pid: int

    def cpu_seconds(self) -> float:
        """Of all its threads; to the nanosecond, which /proc/PID/stat is not."""
        threads = Path(f"/proc/{self.pid}/task").iterdir()
        return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


@contextmanager
def frontend(folder: Path, model: Path, engine: str, first: str, variables: dict[str, str]) -> Iterator[Frontend]:
    ready = folder / "ready.json"
    code = f"import sys; from services.command import main\n{first}\nsys.exit(main(['frontend', *sys.argv[1:]]))"
    flags = ["--port", "0", "--model", str(model), "--served-model-name", MODEL, "--engine-addresses", engine]
    flags += ["--ready-file", str(ready), "--log-level", "warning"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TANDEM_", "OTEL_"))}
    environment |= {"PYTHONPATH": str(ROOT), **variables}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([sys.executable, "-c", code, *flags], env=environment, stdout=log, stderr=log)
    try:
        while not ready.exists():
            if process.poll() is not None:
                raise RuntimeError((folder / "log").read_text())
            time.sleep(0.05)
        url = f"http://127.0.0.1:{json.loads(ready.read_text())['port']}"
        while httpx.get(f"{url}/health/ready").status_code != 200:
            time.sleep(0.05)
        yield Frontend(url, process.pid)
    finally:
        process.terminate()
        process.wait(30)


async def requests(url: str, count: int) -> None:
    """So many short answers, eight at a time, each with a chat template to render."""
    messages = [{"role": "user", "content": "What is the capital of France, and how many people live there?"}]
    body = {"model": MODEL, "messages": messages, "max_tokens": TOKENS_OF_REQUEST, "ignore_eos": True}
    limits = httpx.Limits(max_connections=8)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        for answer in await asyncio.gather(*(client.post("/v1/chat/completions", json=body) for _ in range(count))):
            answer.raise_for_status()


async def streams(url: str, count: int) -> None:
    """So many long streams at once."""
    body = {"model": MODEL, "prompt": "Once", "max_tokens": TOKENS_OF_STREAM, "ignore_eos": True, "stream": True}
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=httpx.Limits(max_connections=count)) as client:

        async def read() -> None:
            async with client.stream("POST", "/v1/completions", json=body) as response:
                response.raise_for_status()
                async for _ in response.aiter_raw():
                    pass

        await asyncio.gather(*(read() for _ in range(count)))


def measure_frontends(rounds: int, num_requests: int, num_streams: int) -> None:
    model = ensure_smollm2()
    flags = ("--executor", "simulated", "--simulated-step-ms", "2", "--max-num-seqs", "256")
    by_request: dict[str, list[float]] = {state: [] for state in STATES}
    by_token: dict[str, list[float]] = {state: [] for state in STATES}
    with (
        tempfile.TemporaryDirectory() as scratch,
        tandem_serve(Path(scratch) / "engine", *flags) as server,
        ExitStack() as stack,
    ):
        engine = f"127.0.0.1:{server.engines[0]['link_port']}"
        frontends: dict[str, Frontend] = {}
        for state, (first, variables) in STATES.items():
            folder = Path(scratch) / f"frontend-{len(frontends)}"
            folder.mkdir()
            frontends[state] = stack.enter_context(frontend(folder, model, engine, first, variables))
            asyncio.run(requests(frontends[state].url, 50))  # what is made once
        for number in range(rounds):
            turn = number % len(STATES)
            for state, each in [*frontends.items()][turn:] + [*frontends.items()][:turn]:
                began = each.cpu_seconds()
                asyncio.run(requests(each.url, num_requests))
                middle = each.cpu_seconds()
                asyncio.run(streams(each.url, num_streams))
                by_request[state].append((middle - began) / num_requests * 1e6)
                by_token[state].append((each.cpu_seconds() - middle) / (num_streams * TOKENS_OF_STREAM) * 1e6)
    print("| frontend | CPU µs a request | CPU µs a streamed token |\n|---|---:|---:|")
    for state in STATES:
        cells = []
        for measured in (by_request, by_token):
            # The least disturbed rounds: whatever else the machine does only adds.
            best, base = (statistics.mean(sorted(measured[each])[: rounds // 2]) for each in (state, "nothing"))
            cells.append(f"{best:.1f} ({100 * (best / base - 1):+.1f}%)")
        print(f"| {state} | {' | '.join(cells)} |")


def measure_engine(num_requests: int, steps: int) -> None:
    """Microseconds of a step without a model, all rows decoding."""
    values: dict[str, Any] = {"executor": "simulated", "max_num_seqs": num_requests, "num_kv_blocks": 100_000}
    settings = EngineSettings(model=str(ensure_smollm2()), **values)
    core = EngineCore(SimulatedExecutor(settings), settings)
    for number in range(num_requests):
        sampling = SamplingParams(max_tokens=100_000, ignore_eos=True)
        core.add(b"frontend", Add(number, pack_token_ids([5] * 10), sampling))
    core.step()
    step_seconds = Distribution([0.001 * 2**power for power in range(13)])
    counted: list[float] = []
    uncounted: list[float] = []
    for number in range(2 * steps):
        began = time.perf_counter()
        if number % 2:
            core.step()
            step_seconds.observe(0.005)
            counted.append(time.perf_counter() - began)
        else:
            with patch.object(Statistics, "add_step", lambda *_: None):
                began = time.perf_counter()
                core.step()
                uncounted.append(time.perf_counter() - began)
    bare, whole = statistics.median(uncounted) * 1e6, statistics.median(counted) * 1e6
    print(f"| {num_requests} | {bare:.1f} | {whole:.1f} | {whole - bare:.1f} | {(whole - bare) / 4700 * 100:.3f}% |")


def measure_counting() -> None:
    """Microseconds of what a frontend counts, by itself: far below what the processes' CPU time can show."""
    prompt, sampling = [5] * 40, SamplingParams()
    sink: Any = None
    pool: Any = None
    generation = Generation("m", prompt, sampling, sink, first_output_at=1.0, finished_at=2.0)
    usage = Usage([len(prompt)], 1, with_reasoning=True)
    usage.add(0, Delta(completion_tokens=200, cached_tokens=16))
    generated = Generated("chat", "m", Choices(pool, [generation], Collector(1)), usage)
    metrics, text = RequestMetrics(), DispatchCounts()
    outcome = Outcome("/v1/chat/completions", 200, 1.5)
    traced = replace(outcome, trace_id="0" * 32)

    def message() -> None:
        began = time.perf_counter()
        text.link.messages_in += 1
        text.link.bytes_in += 1000
        text.output_seconds.observe(time.perf_counter() - began)

    print("| counted | µs |\n|---|---:|")
    for name, work in (
        ("a request", lambda: metrics.ended(outcome, generated, 0.5)),
        ("a request whose trace is an exemplar", lambda: metrics.ended(traced, generated, 0.5)),
        ("a message of an engine, however many tokens it holds", message),
    ):
        print(f"| {name} | {min(timeit.repeat(work, number=20_000, repeat=5)) / 20_000 * 1e6:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--streams", type=int, default=64)
    arguments = parser.parse_args()
    print("| requests in a step | µs without | µs with | metrics | of a step of 4.7 ms (8B on an H200) |")
    print("|---:|---:|---:|---:|---:|")
    for num_requests in (1, 64, 256):
        measure_engine(num_requests, 1000)
    measure_counting()
    measure_frontends(arguments.rounds, arguments.requests, arguments.streams)


if __name__ == "__main__":
    main()
