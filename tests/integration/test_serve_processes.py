"""The processes of `tandem serve`: they start together, none outlives it, and what cannot work is said in words."""

import os
import shutil
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
import pytest

from loadtest.server_process import ServerProcess
from tests.start_server import StartServer

SIMULATED = ("--executor", "simulated")
MODEL = "SmolLM2-135M-Instruct"


def wait_until(condition: Callable[[], object], timeout: float = 30.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def family(server: ServerProcess) -> list[psutil.Process]:
    """The launcher and every process below it."""
    launcher = psutil.Process(server.process.pid)
    return [launcher, *launcher.children(recursive=True)]


def all_gone(processes: list[psutil.Process]) -> bool:
    def gone(process: psutil.Process) -> bool:
        try:
            return process.status() == psutil.STATUS_ZOMBIE  # its reaper may be slow; it runs no more
        except psutil.NoSuchProcess:
            return True

    return all(gone(process) for process in processes)


def complete(server: ServerProcess, **fields: object) -> httpx.Response:
    body = {"model": MODEL, "prompt": "one two three", "max_tokens": 4, **fields}
    return httpx.post(f"{server.url}/v1/completions", json=body, timeout=30)


def test_ctrl_c_stops_everything(smollm2: Path, start_server: StartServer) -> None:
    server = start_server(*SIMULATED)
    processes = family(server)
    assert len(processes) >= 3
    assert complete(server).status_code == 200
    server.interrupt()
    assert server.process.wait(timeout=30) == 0
    assert all_gone(processes)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/health/live")
    assert "Traceback" not in server.log


def test_sigterm_lets_a_running_stream_finish(smollm2: Path, start_server: StartServer) -> None:
    server = start_server(*SIMULATED, "--simulated-step-ms", "20")
    processes = family(server)
    body = {"model": MODEL, "prompt": "one", "max_tokens": 50, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=30) as stream:
        lines = stream.iter_lines()
        first = next(line for line in lines if line.startswith("data: "))
        server.process.terminate()
        rest = [line for line in lines if line.startswith("data: ")]
    assert "error" not in first + "".join(rest)
    assert rest[-1] == "data: [DONE]"
    assert sum('"finish_reason":"length"' in line.replace('": "', '":"') for line in rest) == 1
    assert server.process.wait(timeout=30) == 0
    assert all_gone(processes)


def test_nothing_outlives_a_killed_launcher(smollm2: Path, start_server: StartServer) -> None:
    server = start_server(*SIMULATED)
    processes = family(server)
    server.process.kill()
    server.process.wait()
    wait_until(lambda: all_gone(processes))


def test_a_killed_engine_is_started_again(smollm2: Path, start_server: StartServer) -> None:
    server = start_server(*SIMULATED)
    os.kill(server.engines[0]["pid"], signal.SIGKILL)
    wait_until(lambda: "engine 0 was killed by SIGKILL" in server.log)
    wait_until(lambda: complete(server).status_code == 200, timeout=60)


def test_two_frontends_and_two_engines_serve_on_one_port(smollm2: Path, start_server: StartServer) -> None:
    server = start_server(*SIMULATED, "--frontends", "2", "--engines", "2")
    assert len(server.frontends) == 2
    assert len(server.engines) == 2
    for _ in range(50):
        assert complete(server).status_code == 200
    # Any one of the frontends is enough.
    os.kill(server.frontends[0]["pid"], signal.SIGKILL)
    wait_until(lambda: "frontend 0 was killed by SIGKILL" in server.log)
    assert complete(server).status_code == 200


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (["tokenizer.json", "tokenizer_config.json"], "config.json"),
        ([], "before it was ready"),  # the frontend may be the first to say what it misses
        (["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"], "safetensors"),
    ],
)
def test_a_model_that_cannot_be_loaded_ends_the_whole(
    smollm2: Path, start_server: StartServer, tmp_path: Path, files: list[str], said: str
) -> None:
    folder = tmp_path / "broken-model"
    folder.mkdir()
    for name in files:
        shutil.copy(smollm2 / name, folder)
    server = start_server("--model", str(folder), wait=False)
    assert server.process.wait(timeout=90) == 1
    assert "before it was ready" in server.log
    assert said in server.log
    assert str(folder) in server.log


def test_a_model_that_does_not_exist_is_named(start_server: StartServer) -> None:
    server = start_server("--model", "/no/such/folder", wait=False)
    assert server.process.wait(timeout=90) == 1
    assert "/no/such/folder" in server.log


def test_a_taken_port_is_told_before_anything_starts(start_server: StartServer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = start_server(*SIMULATED, "--port", str(port), wait=False)
        assert server.process.wait(timeout=30) == 1
    assert f"port {port} of 127.0.0.1 is taken" in server.log
    assert "loading" not in server.log


def test_a_wrong_flag_ends_it_with_2(start_server: StartServer) -> None:
    server = start_server("--max-num-seqs", "0", wait=False)
    assert server.process.wait(timeout=30) == 2
    assert "--max-num-seqs" in server.log
