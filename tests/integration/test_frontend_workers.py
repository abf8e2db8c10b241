"""`tandem frontend --workers`: processes that share a port, whose metrics add up, and that are missed when they die."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from loadtest.server_process import ROOT, tandem_serve

MODEL = "SmolLM2-135M-Instruct"


@pytest.fixture(scope="module")
def engine_address(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    flags = ("--executor", "simulated", "--simulated-step-ms", "5")
    with tandem_serve(tmp_path_factory.mktemp("engine"), *flags) as server:
        yield f"127.0.0.1:{server.engines[0]['link_port']}"


class Workers:
    def __init__(self, process: subprocess.Popen[bytes], ready: dict[str, object]) -> None:
        self.process = process
        self.url = f"http://127.0.0.1:{ready['port']}"

    def pids(self) -> set[int]:
        return {child.pid for child in psutil.Process(self.process.pid).children()}

    def complete(self, max_tokens: int = 4) -> int:
        body = {"model": MODEL, "prompt": "Hello", "max_tokens": max_tokens, "ignore_eos": True}
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=60).status_code

    def metric(self, name: str) -> float:
        """From whichever worker takes the connection."""
        text = httpx.get(f"{self.url}/metrics", timeout=60).text
        return sum(float(value) for value in re.findall(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE))


@pytest.fixture
def workers(engine_address: str, smollm2: Path, tmp_path: Path) -> Iterator[Workers]:
    ready_file = tmp_path / "ready.json"
    flags = ["--workers", "2", "--port", "0", "--model", str(smollm2), "--served-model-name", MODEL]
    flags += ["--engine-addresses", engine_address, "--ready-file", str(ready_file)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TANDEM_")}
    environment |= {"PYTHONPATH": str(ROOT), "TANDEM_LAUNCHER_PID": str(os.getpid())}
    with (tmp_path / "log").open("wb") as log:
        command = [sys.executable, "-m", "services.command", "frontend", *flags]
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        until(lambda: ready_file.exists() or process.poll() is not None, (tmp_path / "log").read_text)
        assert process.poll() is None, (tmp_path / "log").read_text()
        workers = Workers(process, json.loads(ready_file.read_text()))
        until(lambda: all(httpx.get(f"{workers.url}/health/ready").status_code == 200 for _ in range(10)))
        yield workers
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()  # its children see their parent die, and end too
        process.wait()


def until(condition: Callable[[], bool], explain: Callable[[], str] = lambda: "", timeout: float = 90.0) -> None:
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end, explain()
        time.sleep(0.02)


ANSWERED = 'tandem_frontend_requests_total{route="/v1/completions",status="200"}'
GENERATIONS = f'tandem_frontend_generations_in_flight{{model="{MODEL}"}}'
RUNNING = "tandem_frontend_requests_in_flight"


def test_requests_are_shared_metrics_add_up_and_a_worker_that_dies_is_replaced(workers: Workers) -> None:
    before = workers.pids()
    assert len(before) == 2
    with ThreadPoolExecutor(16) as threads:
        assert set(threads.map(lambda _: workers.complete(), range(40))) == {200}
        until(lambda: [workers.metric(ANSWERED) for _ in range(6)] == [40.0] * 6)

        # Both have long streams when one of them is killed: its own are lost, and counted no more.
        running = [threads.submit(workers.complete, 1000) for _ in range(12)]
        until(lambda: workers.metric(RUNNING) == 13)
        until(lambda: workers.metric(GENERATIONS) == 12)
        assert workers.metric(f'tandem_frontend_engines_ready{{model="{MODEL}"}}') == 1
        killed = before.pop()
        os.kill(killed, signal.SIGKILL)
        until(lambda: len(workers.pids() - {killed}) == 2)
        outcomes = [future.exception() or future.result() for future in running]
    assert all(outcome == 200 or isinstance(outcome, httpx.TransportError) for outcome in outcomes)
    until(lambda: workers.metric(RUNNING) == 1)
    until(lambda: workers.metric(ANSWERED) == 40 + outcomes.count(200))
    assert before < workers.pids()


def test_sigterm_lets_the_streams_of_all_workers_end(workers: Workers) -> None:
    with ThreadPoolExecutor(8) as threads:
        running = [threads.submit(workers.complete, 800) for _ in range(8)]
        until(lambda: workers.metric(RUNNING) == 9)
        pids = workers.pids()
        workers.process.send_signal(signal.SIGTERM)
        assert [future.result() for future in running] == [200] * 8
    assert workers.process.wait(60) == 0
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_a_worker_that_cannot_start_ends_the_whole(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "services.command", "frontend", "--workers", "2", "--port", "0"]
    done = subprocess.run([*command, "--model", str(tmp_path / "none")], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert "before it was ready; its own message is above" in done.stderr


def test_workers_start_without_the_engines_code() -> None:
    """As in a frontend's image."""
    code = "import sys; sys.modules['services.engine'] = None; import services.launcher.workers"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
