"""Frontends and engines as processes of their own, started one by one as pods would be: for tests that disturb them.

Every process dies with the test's (as under `tandem serve`), and `close` fails where one is left over or a KV block
is not free.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from pathlib import Path

from link_proxy import LinkProxies, LinkProxy

from tests.free_port import free_port

ROOT = Path(__file__).parents[2]
HEARTBEAT_INTERVAL = 0.25
HEARTBEAT_TIMEOUT = 1.5
Settings = dict[str, object]


def wait_until(condition: Callable[[], object], what: str, timeout: float = 60.0) -> float:
    """Look again and again; how many seconds it took."""
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < timeout, f"not within {timeout:g} s: {what}"
        time.sleep(0.01)
    return time.monotonic() - begin


class Member(ABC):
    """One process of the fleet, and those that come after it in its place."""

    kind = ""
    metrics_prefix = ""

    def __init__(self, folder: Path, settings: Settings) -> None:
        self.settings = settings
        self.log_file = folder.with_suffix(".log")
        self.ready_file = folder.with_suffix(".json")
        self.process: subprocess.Popen[bytes] | None = None
        self.ready: dict[str, int] = {}
        self.patch = ""  # code that runs in the process first

    def start(self) -> None:
        """Only from the main thread: the process dies with the thread that started it."""
        self.ready_file.unlink(missing_ok=True)
        variables = {name: value for name, value in os.environ.items() if not name.startswith("TANDEM_")}
        variables |= {"PYTHONPATH": str(ROOT), "TANDEM_LAUNCHER_PID": str(os.getpid()), "OMP_NUM_THREADS": "1"}
        for name, value in {**self.settings, "ready_file": self.ready_file}.items():
            variables[f"TANDEM_{name.upper()}"] = json.dumps(value) if isinstance(value, list) else str(value)
        with self.log_file.open("ab") as log:
            code = f"import sys; from services.command import main\n{self.patch}\nsys.exit(main([{self.kind!r}]))"
            command = [sys.executable, "-c", code]
            self.process = subprocess.Popen(command, env=variables, stdin=subprocess.DEVNULL, stderr=log)

    @property
    def is_up(self) -> bool:
        """It serves. Fails where it has ended instead."""
        assert self.process is not None
        assert self.process.poll() is None, self.log[-4000:]
        if not self.ready_file.exists():
            return False
        self.ready = json.loads(self.ready_file.read_text())
        return True

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def send(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def wait(self, timeout: float = 30.0) -> int:
        """Its exit status."""
        assert self.process is not None
        return self.process.wait(timeout)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    @property
    @abstractmethod
    def probe_port(self) -> int: ...

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.probe_port}{path}", timeout=10) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def metric(self, name: str) -> float:
        """One without labels, or the sum over its labels."""
        lines = self.get("/metrics")[1].splitlines()
        full = f"{self.metrics_prefix}{name}"
        values = [float(line.split()[-1]) for line in lines if line.startswith((full + " ", full + "{"))]
        assert values, f"no metric {full}"
        return sum(values)


class Engine(Member):
    kind = "engine"
    metrics_prefix = "tandem_engine_"

    @property
    def link_port(self) -> int:
        return int(str(self.settings["link_port"]))

    @property
    def probe_port(self) -> int:
        return self.ready["probe_port"]

    @property
    def left_over(self) -> dict[str, float]:
        """What an idle engine must not have."""
        return {
            "running": self.metric("requests_running"),
            "waiting": self.metric("requests_waiting"),
            "waiting for a grammar": self.metric("requests_preparing"),
            "blocks in use": self.metric("kv_blocks") - self.metric("kv_blocks_free"),
        }


class Frontend(Member):
    kind = "frontend"
    metrics_prefix = "tandem_frontend_"

    @property
    def probe_port(self) -> int:
        return self.port

    @property
    def port(self) -> int:
        return self.ready["port"]

    @property
    def is_ready(self) -> bool:
        try:
            return self.get("/health/ready")[0] == 200
        except OSError:
            return False


class ProcessFleet:
    """`links[f][e]` is the proxy between frontend f and engine e."""

    def __init__(
        self,
        folder: Path,
        model: Path,
        num_frontends: int,
        num_engines: int,
        *,
        engine: Settings | None = None,
        frontend: Settings | None = None,
    ) -> None:
        common: Settings = {
            "model": str(model),
            "served_model_name": ["m"],
            "heartbeat_interval": HEARTBEAT_INTERVAL,
            "heartbeat_timeout": HEARTBEAT_TIMEOUT,
        }
        self._proxies = LinkProxies()
        self.engines = [
            Engine(
                folder / f"engine-{number}",
                {
                    **common,
                    "executor": "simulated",
                    "simulated_step_ms": 20,
                    "num_kv_blocks": 2048,
                    "link_port": free_port(),
                    "probe_port": 0,
                    **(engine or {}),
                },
            )
            for number in range(num_engines)
        ]
        self.links: list[list[LinkProxy]] = []
        self.frontends: list[Frontend] = []
        for number in range(num_frontends):
            links = [self._proxies.to(engine.link_port) for engine in self.engines]
            addresses = [f"127.0.0.1:{link.port}" for link in links]
            settings: Settings = {
                **common,
                "port": 0,
                "log_level": "info",
                "engine_addresses": addresses,
                **(frontend or {}),
            }
            self.links.append(links)
            self.frontends.append(Frontend(folder / f"frontend-{number}", settings))

    @property
    def members(self) -> list[Member]:
        return [*self.engines, *self.frontends]

    def start(self) -> None:
        for member in self.members:
            member.start()
        for member in self.members:
            wait_until(lambda member=member: member.is_up, "a process serves", timeout=120)
        self.wait_connected()

    def wait_connected(self) -> None:
        """Every frontend uses every engine."""
        for frontend in self.frontends:
            wait_until(
                lambda frontend=frontend: frontend.metric("engines_ready") == len(self.engines),
                "every frontend uses every engine",
            )

    def frontend_metric(self, name: str) -> float:
        return sum(frontend.metric(name) for frontend in self.frontends)

    def assert_nothing_left(self, engines: Iterable[Engine] | None = None) -> None:
        """No request anywhere, and every block free, in the end."""
        for engine in self.engines if engines is None else engines:
            wait_until(
                lambda engine=engine: not any(engine.left_over.values()), "an engine is idle, its blocks free", 20
            )
        for frontend in self.frontends:
            wait_until(
                lambda frontend=frontend: not frontend.metric("generations_in_flight"), "no generation is left", 20
            )
            assert frontend.metric("streams_in_flight") == 0

    def close(self) -> None:
        """End what runs. Raises AssertionError where a process does not end as it should."""
        try:
            for member in self.members:
                if member.is_running:
                    with contextlib.suppress(ProcessLookupError):
                        member.send(signal.SIGCONT)
                        member.send(signal.SIGTERM)
            for member in self.members:
                if member.process is not None:
                    member.wait()
            for member in self.members:
                assert "Traceback" not in member.log, member.log
        finally:
            for member in self.members:
                member.kill()
            self._proxies.close()
