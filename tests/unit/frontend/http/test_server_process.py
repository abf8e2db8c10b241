"""A frontend as a process: the ready file, SIGTERM with streams running, and what keeps it from starting."""

import asyncio
import contextlib
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from echo_app import parse_events

from services.frontend.http.server import CannotListen, Server, bind
from services.frontend.main import run, served_models
from services.frontend.settings import FrontendSettings, ServedModel
from services.frontend.thread_priority import SLICE_NANOSECONDS, run_soon, slice_nanoseconds

ROOT = Path(__file__).parents[4]


class EchoServer:
    def __init__(self, tokenizer_folder: Path, folder: Path, *flags: str) -> None:
        self.ready_file = folder / "ready.json"
        paths = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
        command = [sys.executable, str(Path(__file__).parent / "echo_server.py"), str(tokenizer_folder)]
        command += ["--port", "0", "--ready-file", str(self.ready_file), *flags]
        environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        self.wait_for(self.ready_file.exists)
        self.url = f"http://127.0.0.1:{json.loads(self.ready_file.read_text())['port']}"

    def wait_for(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert self.process.poll() is None, self.process.stderr and self.process.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def status(self) -> int:
        return httpx.get(self.url + "/health/ready").status_code


@pytest.fixture
def start(tokenizer_folder: Path, tmp_path: Path) -> Iterator[Callable[..., EchoServer]]:
    servers: list[EchoServer] = []

    def start(*flags: str) -> EchoServer:
        servers.append(EchoServer(tokenizer_folder, tmp_path, *flags))
        return servers[-1]

    yield start
    for server in servers:
        if server.process.poll() is None:
            server.process.kill()
        server.process.communicate(timeout=20)


def test_its_event_loop_runs_soon_where_the_system_can(start):
    taken: list[bool] = []
    thread = threading.Thread(target=lambda: taken.append(run_soon()))
    thread.start()
    thread.join()
    event_loop = start().process.pid  # the process's first thread
    assert (slice_nanoseconds(event_loop) == SLICE_NANOSECONDS) == taken[0]


def test_sigterm_lets_streams_run_to_their_end(start):
    # Long enough for two requests on a machine that is busy with other things.
    server = start("--drain-delay", "3")
    body = {"prompt": "slow and steady, to the very end", "max_tokens": 100, "stream": True}
    with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=60) as response:
        lines = response.iter_text()
        text = next(lines)
        assert server.status() == 200
        server.terminate()
        # Not ready at once, though connections are still taken while load balancers find out.
        server.wait_for(lambda: server.status() == 503)
        short = httpx.post(server.url + "/v1/completions", json={"prompt": "late"})
        assert short.json()["choices"][0]["text"] == "late"
        text += "".join(lines)
    events = parse_events(text)
    assert "".join(c["text"] for event in events for c in event["choices"]) == body["prompt"]
    assert events[-1]["choices"][0]["finish_reason"] == "stop"
    assert server.process.wait(20) == 0
    with pytest.raises(httpx.ConnectError):
        server.status()


def test_after_the_grace_period_streams_end_with_an_error(start):
    server = start("--shutdown-grace", "0.2")
    with httpx.stream("POST", server.url + "/v1/completions", json={"prompt": "hang", "stream": True}) as response:
        lines = response.iter_text()
        text = next(lines)
        server.terminate()
        text += "".join(lines)
    assert parse_events(text)[-1]["error"]["message"] == "this server is shutting down"
    assert server.process.wait(20) == 0


def test_the_ready_file_is_touched_while_the_event_loop_turns(start):
    server = start()
    first = server.ready_file.stat().st_mtime_ns
    server.wait_for(lambda: server.ready_file.stat().st_mtime_ns != first)
    assert "port" in json.loads(server.ready_file.read_text())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_idle_server_leaves_with_status_0(start, number):
    server = start()
    server.process.send_signal(number)
    assert server.process.wait(20) == 0
    assert "Traceback" not in server.process.communicate()[1]


def test_a_second_signal_does_not_wait(start):
    server = start()
    with (
        contextlib.suppress(httpx.HTTPError),
        httpx.stream("POST", server.url + "/v1/completions", json={"prompt": "hang", "stream": True}) as response,
    ):
        next(response.iter_text())
        server.terminate()
        server.wait_for(lambda: not _listens(server.url))
        server.terminate()
        assert server.process.wait(20) == 0


def _listens(url: str) -> bool:
    try:
        socket.create_connection(("127.0.0.1", int(url.rsplit(":", 1)[1])), timeout=1).close()
    except OSError:
        return False
    return True


def test_a_port_that_is_taken():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(CannotListen, match=rf"127.0.0.1:{port}.*--port"):
            bind("127.0.0.1", port)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "/no/such/folder"}, "/no/such/folder"),
        ({}, "--model is needed"),
        ({"reasoning_parser": "telepathy"}, "telepathy"),
        ({"tool_call_parser": "telepathy"}, "hermes, llama3_json"),
        ({"chat_template": Path("/no/template")}, "/no/template"),
        ({"api_key_file": Path("/no/keys")}, "/no/keys"),
        ({"engine_addresses": ["nonsense"]}, "nonsense"),
        ({"host": "no.such.host.invalid"}, "no.such.host.invalid"),
        ({"ready_file": Path("/no/folder/ready")}, "/no/folder/ready"),
    ],
)
def test_what_keeps_it_from_starting_is_one_line(tokenizer_folder, changes, message, capfd, root_logger, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model = {"model": str(tokenizer_folder)} if changes else {}
    assert run(FrontendSettings(port=0, **(model | changes))) == 1
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    (said,) = [line for line in lines if line["level"] in ("error", "critical")]
    assert message in said["message"]
    assert "exception" not in said


def test_one_model_or_several():
    flat = served_models(FrontendSettings(model="m", served_model_name=["a", "b"], engine_addresses=["h:1"]))
    assert (flat[0].model, flat[0].served_model_name, flat[0].engine_addresses) == ("m", ["a", "b"], ["h:1"])
    several = [ServedModel(model="x"), ServedModel(model="y")]
    assert served_models(FrontendSettings(models=several)) == several
    with pytest.raises(ValueError, match="--models"):
        served_models(FrontendSettings(model="m", models=several))


def test_the_collector_need_not_look_at_what_was_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full collection over everything that transformers imports would stop all streams for a fifth of a second."""

    async def nothing(self: uvicorn.Server, sockets: list[socket.socket] | None = None) -> None:
        pass

    frozen: list[bool] = []
    monkeypatch.setattr(uvicorn.Server, "startup", nothing)
    monkeypatch.setattr(gc, "freeze", lambda: frozen.append(True))
    state: Any = None
    server = Server(uvicorn.Config(app=state), FrontendSettings(), state, 1)  # pyright: ignore[reportCallIssue]
    asyncio.run(server.startup())
    assert frozen == [True]
