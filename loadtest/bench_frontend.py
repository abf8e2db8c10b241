"""What one frontend process carries: streams at a set pace from simulated engines, over real sockets and HTTP.

    python -m loadtest.bench_frontend [--streams 64 256 1000] [--engines 1 2 4 8] [--seconds 8]

Each cell: the streams run at 50 tokens/s each; over some seconds of the steady state, the tokens that reached the
clients, the frontend's CPU time for each of them, and how long a token takes from the end of the engine's step to the
client's socket. The engines' and the clients' CPU time is shown too: on few cores they take from the frontend.
"""

import argparse
import asyncio
import contextlib
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import cast

import psutil
import uvloop

from loadtest.bench_serve import percentile
from loadtest.server_process import ROOT
from services.launcher.smollm2 import ensure_smollm2

STEP_MS = 20
NUM_STAMPS = 4096  # milliseconds; a token on its way for longer would seem younger than it is
MAX_TOKENS = 4000
SAMPLE_EVERY = 8  # of so many streams one has its tokens' age looked at
_TEXT = re.compile(rb'"text":"([^"]*)"')


@dataclass(slots=True)
class Cell:
    """One line of the table. Tokens a second; milliseconds; CPU microseconds."""

    streams: int
    engines: int
    generated_rate: float
    delivered_rate: float
    latency_median_ms: float
    latency_p99_ms: float
    frontend_cpu_us: float  # for each delivered token
    frontend_cores: float
    engine_cpu_us: float  # of all engines, for each delivered token
    client_cores: float
    load_average: float


@dataclass(slots=True)
class Ages:
    """What the clients see. `counting` is set during the measured seconds."""

    stamps: dict[bytes, int]
    counting: bool = False
    tokens: int = 0
    ages_ms: list[float] = field(default_factory=list)
    begun: int = 0
    broken: list[str] = field(default_factory=list)


class Client(asyncio.Protocol):
    """One stream, counted as bytes: each token's text is one blank and letters."""

    def __init__(self, request: bytes, ages: Ages, sampled: bool) -> None:
        self._request = request
        self._ages = ages
        self._sampled = sampled
        self._begun = False
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one, without saying so
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        ages = self._ages
        if not self._begun:
            self._begun = True
            ages.begun += 1
            if not data.startswith(b"HTTP/1.1 200"):
                ages.broken.append(data[:300].decode(errors="replace"))
            return
        if not ages.counting:
            return
        ages.tokens += data.count(b" ") - data.count(b"data: ")
        if self._sampled:
            now = int(time.monotonic() * 1000)
            for text in _TEXT.findall(data):
                for word in text.split():
                    stamp = ages.stamps.get(word)
                    if stamp is not None:
                        ages.ages_ms.append((now - stamp) % NUM_STAMPS)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._ages.counting:
            self._ages.broken.append(f"a stream ended early: {exc}")

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


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


@contextlib.contextmanager
def running_fleet(folder: Path, scratch: Path, stamp_file: Path, num_engines: int) -> Iterator["Fleet"]:
    """One frontend and `num_engines` engines, until the block ends."""
    processes: list[subprocess.Popen[bytes]] = []

    def start(name: str, command: Sequence[str], **settings: object) -> Path:
        ready = scratch / f"{name}.json"
        ready.unlink(missing_ok=True)
        variables = {key: value for key, value in os.environ.items() if not key.startswith("TANDEM_")}
        variables |= {"TANDEM_LAUNCHER_PID": str(os.getpid()), "PYTHONPATH": str(ROOT), "TANDEM_LOG_LEVEL": "warning"}
        for key, value in {"model": folder, "served_model_name": '["m"]', "ready_file": ready, **settings}.items():
            variables[f"TANDEM_{key.upper()}"] = str(value)
        with (scratch / f"{name}.log").open("wb") as log:
            processes.append(subprocess.Popen([sys.executable, "-m", *command], env=variables, stderr=log))
        return ready

    def wait(ready: Path) -> dict[str, int]:
        deadline = time.monotonic() + 120
        while not ready.exists():
            if time.monotonic() > deadline or any(process.poll() is not None for process in processes):
                raise RuntimeError(f"a process did not start; see {scratch}")
            time.sleep(0.05)
        return json.loads(ready.read_text())

    try:
        ready_files = [
            start(
                f"engine-{number}",
                ["loadtest.stamping_engine", str(stamp_file)],
                executor="simulated",
                simulated_step_ms=STEP_MS,
                link_port=0,
                probe_port=0,
                max_num_seqs=4096,
                max_num_batched_tokens=16384,
                num_kv_blocks=200_000,
                heartbeat_timeout=30,
            )
            for number in range(num_engines)
        ]
        ports = [wait(ready) for ready in ready_files]
        addresses = [f"127.0.0.1:{each['link_port']}" for each in ports]
        ready = start(
            "frontend",
            ["services.command", "frontend"],
            port=0,
            engine_addresses=json.dumps(addresses),
            heartbeat_timeout=30,
            max_failovers=0,
        )
        *engines, frontend = (process.pid for process in processes)
        yield Fleet(wait(ready)["port"], [each["probe_port"] for each in ports], frontend, engines)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


@dataclass(slots=True)
class Fleet:
    """One frontend and its engines: where they are, and their process ids."""

    port: int
    probe_ports: list[int]
    frontend: int
    engines: list[int]

    def generated_tokens(self) -> float:
        """By all engines since they started."""
        total = 0.0
        for port in self.probe_ports:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
                found = re.search(rb"^tandem_engine_generated_tokens_total (\S+)", response.read(), re.MULTILINE)
            assert found is not None
            total += float(found.group(1))
        return total


def cpu_seconds(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


async def measure(fleet: Fleet, streams: int, seconds: float, stamps: dict[bytes, int]) -> Cell:
    ages = Ages(stamps)
    content = {"model": "m", "prompt": [500] * 8, "max_tokens": MAX_TOKENS, "ignore_eos": True, "stream": True}
    encoded = json.dumps(content).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: b\r\nContent-Type: application/json\r\nContent-Length: {len(encoded)}"
    )
    request = head.encode() + b"\r\n\r\n" + encoded
    loop = asyncio.get_running_loop()
    clients: list[Client] = []
    try:
        for number in range(streams):
            client = Client(request, ages, number % SAMPLE_EVERY == 0)
            await loop.create_connection(lambda client=client: client, "127.0.0.1", fleet.port)
            clients.append(client)
            if number % 20 == 19:
                await asyncio.sleep(0.02)
        deadline = loop.time() + 60
        while ages.begun < streams:
            if loop.time() > deadline or ages.broken:
                raise RuntimeError(f"{ages.begun} of {streams} streams began: {ages.broken[:1]}")
            await asyncio.sleep(0.05)
        await asyncio.sleep(1.0)

        pids = (fleet.frontend, os.getpid(), *fleet.engines)
        generated = [fleet.generated_tokens()]
        before = [cpu_seconds(pid) for pid in pids]
        began = loop.time()
        ages.counting = True
        await asyncio.sleep(seconds)
        ages.counting = False
        took = loop.time() - began
        after = [cpu_seconds(pid) for pid in pids]
        generated.append(fleet.generated_tokens())
    finally:
        ages.counting = False
        for client in clients:
            client.close()
    if ages.broken:
        raise RuntimeError(ages.broken[0])
    used = [end - start for start, end in zip(before, after, strict=True)]
    return Cell(
        streams=streams,
        engines=len(fleet.engines),
        generated_rate=(generated[1] - generated[0]) / took,
        delivered_rate=ages.tokens / took,
        latency_median_ms=percentile(ages.ages_ms, 50),
        latency_p99_ms=percentile(ages.ages_ms, 99),
        frontend_cpu_us=1e6 * used[0] / ages.tokens,
        frontend_cores=used[0] / took,
        engine_cpu_us=1e6 * sum(used[2:]) / ages.tokens,
        client_cores=used[1] / took,
        load_average=os.getloadavg()[0],
    )


def table(cells: list[Cell]) -> str:
    """The cells as a Markdown table."""
    head = (
        "| engines | streams | generated tok/s | delivered tok/s | way ms, median / p99 | frontend CPU µs/token "
        "| frontend cores | engines CPU µs/token | clients' cores |\n|---:|---:|---:|---:|---:|---:|---:|---:|---:|"
    )
    lines = [
        f"| {cell.engines} | {cell.streams} | {cell.generated_rate:.0f} | {cell.delivered_rate:.0f} "
        f"| {cell.latency_median_ms:.0f} / {cell.latency_p99_ms:.0f} | {cell.frontend_cpu_us:.1f} "
        f"| {cell.frontend_cores:.2f} | {cell.engine_cpu_us:.1f} | {cell.client_cores:.2f} |"
        for cell in cells
    ]
    return "\n".join([head, *lines])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[64, 256, 1000])
    parser.add_argument("--engines", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--seconds", type=float, default=8.0, help="of the steady state that are measured (default 8)")
    parser.add_argument("--output", type=Path, default=ROOT / "loadtest" / "results" / "bench_frontend.json")
    options = parser.parse_args(arguments)

    folder = ensure_smollm2()
    ids, words = stamp_tokens(folder)
    stamps = {word: number for number, word in enumerate(words)}
    cells: list[Cell] = []
    with tempfile.TemporaryDirectory(prefix="tandem-bench-") as scratch:
        stamp_file = Path(scratch) / "stamps.json"
        stamp_file.write_text(json.dumps(ids))
        for num_engines in options.engines:
            with running_fleet(folder, Path(scratch), stamp_file, num_engines) as fleet:
                for streams in options.streams:
                    print(f"{streams} streams, {num_engines} engines …", file=sys.stderr, flush=True)
                    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                        cells.append(runner.run(measure(fleet, streams, options.seconds, stamps)))
                    print(asdict(cells[-1]), file=sys.stderr, flush=True)
    print(table(cells))
    options.output.parent.mkdir(parents=True, exist_ok=True)
    machine = {"cores": os.cpu_count(), "python": platform.python_version(), "load_average": os.getloadavg()[0]}
    options.output.write_text(
        json.dumps({"machine": machine, "cells": [asdict(cell) for cell in cells]}, indent=2) + "\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
