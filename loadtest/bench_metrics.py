"""What metrics and traces cost: frontends with and without them, side by side, and the engine's own part of a step.

    python -m loadtest.bench_metrics [--rounds 6] [--requests 200] [--streams 32]

Frontend processes in three states (nothing counted, metrics, metrics and traces sampled at 1% whose collector is away)
take turns with the same load on one simulated engine; each number is the frontend's CPU time, the median of the rounds.
The engine's part is measured in this process, steps with and without counting in turns.
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
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
import psutil

from loadtest.server_process import ROOT, tandem_serve
from services.engine.core import EngineCore
from services.engine.executor.simulated import SimulatedExecutor
from services.engine.settings import EngineSettings
from services.engine.statistics import Statistics
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
    process: psutil.Process

    def cpu_seconds(self) -> float:
        times = self.process.cpu_times()
        return times.user + times.system


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
        yield Frontend(url, psutil.Process(process.pid))
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
    with tempfile.TemporaryDirectory() as scratch, tandem_serve(Path(scratch) / "engine", *flags) as server:
        engine = f"127.0.0.1:{server.engines[0]['link_port']}"
        for number in range(rounds + 1):
            for state, (first, variables) in STATES.items():
                folder = Path(scratch) / f"{number}-{state}"
                folder.mkdir()
                with frontend(folder, model, engine, first, variables) as each:
                    asyncio.run(requests(each.url, 40))  # what is made once
                    began = each.cpu_seconds()
                    asyncio.run(requests(each.url, num_requests))
                    middle = each.cpu_seconds()
                    asyncio.run(streams(each.url, num_streams))
                    end = each.cpu_seconds()
                if number:  # the first round warms the machine
                    by_request[state].append((middle - began) / num_requests * 1e6)
                    by_token[state].append((end - middle) / (num_streams * TOKENS_OF_STREAM) * 1e6)
    print("| frontend | CPU µs a request | CPU µs a streamed token |\n|---|---:|---:|")
    for state in STATES:
        cells = []
        for measured in (by_request, by_token):
            median, base = statistics.median(measured[state]), statistics.median(measured["nothing"])
            cells.append(f"{median:.1f} ({100 * (median / base - 1):+.1f}%)")
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--streams", type=int, default=32)
    arguments = parser.parse_args()
    print("| requests in a step | µs without | µs with | metrics | of a step of 4.7 ms (8B on an H200) |")
    print("|---:|---:|---:|---:|---:|")
    for num_requests in (1, 64, 256):
        measure_engine(num_requests, 1000)
    measure_frontends(arguments.rounds, arguments.requests, arguments.streams)


if __name__ == "__main__":
    main()
