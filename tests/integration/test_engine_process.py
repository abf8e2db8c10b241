"""Engine processes, ended in every way: drained, killed, unable to start, a thread that fails, a step that hangs."""

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_harness import EOS, LinkFrontend, make_add, wait_until, write_model

from shared.protocol import FinishReason, Goodbye, Outputs
from shared.structured_output import StructuredOutput

RUN = """
import sys
from services.engine.main import run
from services.engine.settings import EngineSettings
{patch}
sys.exit(run(EngineSettings()))
"""


class EngineProcess:
    """`tandem engine` with a simulated executor, on free ports. `patch` is code that runs in it first."""

    def __init__(self, folder: Path, patch: str = "pass", **overrides: Any) -> None:
        self.ready_file = folder / "ready" / "engine.json"
        self.log = folder / "engine.log"
        settings = {
            "model": str(folder / "model"),
            "executor": "simulated",
            "link_port": 0,
            "probe_port": 0,
            "num_kv_blocks": 256,
            "block_size": 4,
            "simulated_step_ms": 5,
            "heartbeat_interval": 0.1,
            "shutdown_grace": 10,
            "ready_file": str(self.ready_file),
            **overrides,
        }
        variables = {f"TANDEM_{name.upper()}": str(value) for name, value in settings.items()}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", RUN.format(patch=patch)], env={**os.environ, **variables}, stderr=log
            )

    def wait_ready(self) -> "EngineProcess":
        wait_until(lambda: self.ready_file.exists() or self.process.poll() is not None, "the engine serves")
        assert self.process.poll() is None, self.log.read_text()
        ports = json.loads(self.ready_file.read_text())
        self.link_port: int = ports["link_port"]
        self.probe_port: int = ports["probe_port"]
        return self

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.probe_port}{path}", timeout=10) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def metric(self, name: str) -> float:
        for line in self.get("/metrics")[1].splitlines():
            if line.startswith(f"tandem_engine_{name} "):
                return float(line.split()[1])
        raise AssertionError(f"no metric {name}")

    def exit_code(self, timeout: float = 20.0) -> int:
        return self.process.wait(timeout)

    def messages(self) -> list[str]:
        return [json.loads(line)["message"] for line in self.log.read_text().splitlines() if line.startswith("{")]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., EngineProcess]]:
    write_model(tmp_path / "model")
    started: list[EngineProcess] = []

    def start_one(**overrides: Any) -> EngineProcess:
        started.append(EngineProcess(tmp_path, **overrides))
        return started[-1]

    yield start_one
    for engine in started:
        if engine.process.poll() is None:
            engine.process.kill()
        engine.process.wait()


def test_it_serves_and_tells_how_it_is(start: Callable[..., EngineProcess]) -> None:
    engine = start(simulated_tokens="echo").wait_ready()
    assert engine.get("/health/live") == (200, "ok\n")
    assert engine.get("/health/ready") == (200, "ok\n")
    assert engine.get("/nothing")[0] == 404
    with LinkFrontend(engine.link_port) as frontend:
        welcome = frontend.hello()
        assert (welcome.limits.max_model_len, welcome.limits.eos_token_ids) == (1024, [EOS])
        frontend.send(make_add(1, [5, 6, 7], max_tokens=10))
        assert frontend.collect([1])[1].token_ids == [5, 6, 7, EOS]
        frontend.send(b"\xc1")
        wait_until(lambda: engine.metric("malformed_messages_total") == 1, "the bad message is counted")
    assert engine.metric("generated_tokens_total") == 4
    assert engine.metric("prompt_tokens_total") == 3
    assert engine.metric("kv_blocks_free") == engine.metric("kv_blocks") == 256
    assert engine.metric("requests_running") == engine.metric("requests_waiting") == 0
    assert engine.metric("step_seconds_count") >= 4
    assert 'requests_finished_total{reason="stop"} 1.0' in engine.get("/metrics")[1]


def test_sigterm_lets_streams_finish(start: Callable[..., EngineProcess]) -> None:
    engine = start().wait_ready()
    with LinkFrontend(engine.link_port) as frontend:
        frontend.hello()
        frontend.send(make_add(1, [5], max_tokens=100))
        frontend.receive_a(Outputs)
        engine.process.send_signal(signal.SIGTERM)
        frontend.receive_a(Goodbye)
        assert engine.get("/health/ready") == (503, "draining\n")
        assert engine.get("/health/live")[0] == 200
        frontend.send(make_add(2, [5], max_tokens=100))
        results = frontend.collect([1, 2])
        assert results[1].finish_reason is FinishReason.LENGTH
        assert results[2].finish_reason is FinishReason.HANDED_OVER
    assert engine.exit_code() == 0


def test_past_the_grace_streams_are_handed_over(start: Callable[..., EngineProcess]) -> None:
    engine = start(shutdown_grace=0.2, max_num_seqs=1).wait_ready()
    with LinkFrontend(engine.link_port) as frontend:
        frontend.hello()
        frontend.send(make_add(1, [5], max_tokens=1000))
        frontend.send(make_add(2, [5], max_tokens=1000))
        frontend.receive_a(Outputs)
        engine.process.send_signal(signal.SIGINT)
        results = frontend.collect([1, 2])
        assert results[1].finish_reason is FinishReason.HANDED_OVER
        assert results[1].token_ids
        assert results[2].finish_reason is FinishReason.HANDED_OVER
    assert engine.exit_code() == 0


def test_an_idle_engine_ends_at_once(start: Callable[..., EngineProcess]) -> None:
    engine = start().wait_ready()
    engine.process.send_signal(signal.SIGTERM)
    assert engine.exit_code(5) == 0


def test_a_second_signal_ends_it_at_once(start: Callable[..., EngineProcess]) -> None:
    engine = start(shutdown_grace=60).wait_ready()
    with LinkFrontend(engine.link_port) as frontend:
        frontend.hello()
        frontend.send(make_add(1, [5], max_tokens=1000))
        frontend.receive_a(Outputs)
        engine.process.send_signal(signal.SIGTERM)
        frontend.receive_a(Goodbye)
        engine.process.send_signal(signal.SIGINT)
        assert engine.exit_code(5) == 128 + signal.SIGINT


def test_a_killed_frontend_leaves_no_work(start: Callable[..., EngineProcess]) -> None:
    engine = start().wait_ready()
    code = (
        "import sys; sys.path.insert(0, 'tests'); from engine_harness import *;"
        f"f = LinkFrontend({engine.link_port}); f.hello();"
        "[f.send(make_add(n, [5], max_tokens=1000)) for n in range(5)]; f.receive_a(Outputs);"
        "print('running', flush=True); time.sleep(60)"
    )
    root = Path(__file__).parents[2]
    with subprocess.Popen([sys.executable, "-c", code], cwd=root, stdout=subprocess.PIPE, text=True) as frontend:
        assert frontend.stdout is not None
        assert frontend.stdout.readline() == "running\n"
        assert engine.metric("requests_running") == 5
        frontend.kill()
    wait_until(lambda: engine.metric("requests_running") == 0, "the requests are aborted")
    assert engine.metric("kv_blocks_free") == 256
    assert engine.metric("frontends") == 0


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ({"model": "/nonexistent/model"}, "The model folder /nonexistent/model does not exist."),
        ({"model": ""}, "No model given"),
        ({"max_model_len": 5000}, "--max-model-len 5000"),
        ({"max_model_len": 2000, "num_kv_blocks": 10}, "lower it to 40"),
        ({"link_host": "192.0.2.1"}, "--link-host"),
        ({"probe_host": "192.0.2.1"}, "--probe-host"),
    ],
)
def test_what_cannot_start_says_why_and_fails(
    start: Callable[..., EngineProcess], overrides: dict[str, Any], says: str
) -> None:
    engine = start(**overrides)
    assert engine.exit_code() == 1
    assert says in engine.messages()[-1]
    assert "Traceback" not in engine.log.read_text()
    assert not engine.ready_file.exists()


def test_a_model_that_is_broken_says_why_and_fails(start: Callable[..., EngineProcess], tmp_path: Path) -> None:
    (tmp_path / "model" / "config.json").write_text("{")
    engine = start()
    assert engine.exit_code() == 1
    assert "config.json cannot be read" in engine.messages()[-1]


IMPORT_SIMULATED = "import time, services.engine.executor.simulated as s; "


def test_a_failing_step_ends_the_process(start: Callable[..., EngineProcess]) -> None:
    engine = start(patch=IMPORT_SIMULATED + "s.SimulatedExecutor.execute = lambda self, step: 1 / 0").wait_ready()
    with LinkFrontend(engine.link_port) as frontend:
        frontend.hello()
        frontend.send(make_add(1, [5], max_tokens=10))
        assert engine.exit_code() == 1
    assert "The engine's loop failed; the engine ends" in engine.messages()
    assert "ZeroDivisionError" in engine.log.read_text()


def test_grammars_to_be_made_cannot_hold_up_the_end(start: Callable[..., EngineProcess]) -> None:
    patch = (
        "import time\n"
        "from services.engine.executor.simulated import SimulatedExecutor\n"
        "from services.engine.grammars import GrammarCompiler\n"
        "SimulatedExecutor.execute = lambda *_: 1 / 0\n"
        "GrammarCompiler._compile = lambda *_: time.sleep(2)\n"
    )
    engine = start(patch=patch).wait_ready()
    with LinkFrontend(engine.link_port) as frontend:
        frontend.hello()
        for request_id in range(60):
            structured = StructuredOutput(kind="choice", value=f'["{request_id}"]')
            frontend.send(make_add(request_id, [5], structured_output=structured))
        frontend.send(make_add(60, [5]))
        assert engine.exit_code() == 1


def test_a_failing_link_ends_the_process(start: Callable[..., EngineProcess]) -> None:
    engine = start(patch="import services.engine.link as l; l.Link._receive = lambda *a: 1 / 0").wait_ready()
    with LinkFrontend(engine.link_port) as frontend:
        frontend.send(make_add(1, [5]))
        assert engine.exit_code() == 1
    assert "The link's thread failed; the engine ends" in engine.messages()


def test_a_leak_ends_the_process(start: Callable[..., EngineProcess]) -> None:
    patch = "from services.engine.kv_cache.cache import KVCache; KVCache.release = lambda self, request: None"
    engine = start(patch=patch).wait_ready()
    with LinkFrontend(engine.link_port) as frontend:
        frontend.hello()
        frontend.send(make_add(1, [5], max_tokens=2))
        assert frontend.collect([1])[1].finish_reason is FinishReason.LENGTH
        assert engine.exit_code() == 1
    assert "KV blocks are in use when no request is there" in engine.log.read_text()


def test_a_hung_step_is_not_alive_and_cannot_hold_up_the_end(start: Callable[..., EngineProcess]) -> None:
    patch = IMPORT_SIMULATED + (
        "s.SimulatedExecutor.execute = lambda self, step: time.sleep(1000);"
        "import services.engine.main as m; m.END_SECONDS = 0.5"
    )
    engine = start(patch=patch, step_timeout=0.5, shutdown_grace=0).wait_ready()
    with LinkFrontend(engine.link_port) as frontend:
        frontend.hello()
        frontend.send(make_add(1, [5], max_tokens=10))
        wait_until(lambda: engine.get("/health/live")[0] == 503, "it is not alive")
        assert engine.get("/health/ready")[0] == 503
        wait_until(lambda: not frontend.socket.poll(300) or not frontend.receive(), "heartbeats stop")
        engine.process.send_signal(signal.SIGTERM)
        assert engine.exit_code() == 1
    assert any("does not end" in message for message in engine.messages())


def test_while_it_loads_it_is_alive_and_not_ready_and_a_signal_ends_it(
    start: Callable[..., EngineProcess], tmp_path: Path
) -> None:
    patch = (
        "import services.engine.executor.simulated as s, services.engine.probes as p, time;"
        f"q = {str(tmp_path / 'port')!r}; o = p.Probes.start;"
        "p.Probes.start = lambda self: (o(self), open(q, 'w').write(str(self.port)));"
        "s.SimulatedExecutor.__init__ = lambda self, settings: time.sleep(1000)"
    )
    engine = start(patch=patch)
    port_file = tmp_path / "port"
    wait_until(lambda: port_file.exists() and bool(port_file.read_text()), "the probes answer")
    engine.probe_port = int(port_file.read_text())
    assert engine.get("/health/live")[0] == 200
    assert engine.get("/health/ready") == (503, "the model is being loaded\n")
    assert engine.get("/metrics")[0] == 200
    engine.process.send_signal(signal.SIGTERM)
    assert engine.exit_code(5) == 128 + signal.SIGTERM
