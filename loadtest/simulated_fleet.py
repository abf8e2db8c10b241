"""One frontend process before simulated engines, as pods would run them: what the frontend's benchmarks measure."""

import contextlib
import json
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from loadtest.server_process import ROOT
from loadtest.stream_load import nicely


@contextlib.contextmanager
def running_fleet(
    folder: Path,
    scratch: Path,
    num_engines: int,
    engine: Mapping[str, object],
    *,
    stamp_file: Path | None = None,
    engine_niceness: int = 0,
) -> Iterator["Fleet"]:
    """One frontend and `num_engines` engines with the settings `engine`, until the block ends. With `stamp_file` a
    token's id says when it was made: see stamping_engine. Nice engines leave the frontend the cores that they share."""
    command = ["services.command", "engine"] if stamp_file is None else ["loadtest.stamping_engine", str(stamp_file)]
    processes: list[subprocess.Popen[bytes]] = []

    def start(name: str, command: Sequence[str], niceness: int = 0, **settings: object) -> Path:
        ready = scratch / f"{name}.json"
        ready.unlink(missing_ok=True)
        variables = {key: value for key, value in os.environ.items() if not key.startswith("TANDEM_")}
        variables |= {"TANDEM_LAUNCHER_PID": str(os.getpid()), "PYTHONPATH": str(ROOT), "TANDEM_LOG_LEVEL": "warning"}
        for key, value in {"model": folder, "served_model_name": '["m"]', "ready_file": ready, **settings}.items():
            variables[f"TANDEM_{key.upper()}"] = str(value)
        with (scratch / f"{name}.log").open("wb") as log:
            line = [*nicely(niceness), sys.executable, "-m", *command]
            processes.append(subprocess.Popen(line, env=variables, stderr=log))
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
                command,
                engine_niceness,
                executor="simulated",
                link_port=0,
                probe_port=0,
                max_num_seqs=4096,
                max_num_batched_tokens=65_536,
                num_kv_blocks=200_000,
                heartbeat_timeout=30,
                **engine,
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


def core_wait_seconds(pid: int) -> float | None:
    """For how long the process's first thread was ready and no core ran it; None where the system does not say."""
    try:
        _, waited, _ = Path(f"/proc/{pid}/schedstat").read_text().split()
    except OSError:
        return None
    return int(waited) / 1e9


def cpu_seconds(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def resident_bytes(pid: int) -> int:
    return psutil.Process(pid).memory_info().rss
