"""Starts `tandem serve` as a user would, on free ports, and always ends it: for tests and for benchmarks."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_POLL_INTERVAL = 0.05  # seconds


class ServerEnded(RuntimeError):
    """The server ended before it was ready; the message has its last output."""


@dataclass(slots=True)
class ServerProcess:
    """A running `tandem serve`. `engines` and `frontends` hold, of each process, its pid and the bound ports."""

    process: subprocess.Popen[bytes]
    log_file: Path
    url: str = ""
    port: int = 0
    engines: list[dict[str, Any]] = field(default_factory=list)
    frontends: list[dict[str, Any]] = field(default_factory=list)

    @property
    def log(self) -> str:
        """What the server and its processes have printed so far."""
        return self.log_file.read_text(encoding="utf-8", errors="replace")

    def interrupt(self) -> None:
        """Ctrl-C: what a terminal sends to every process of its foreground group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def stop(self, timeout: float = 30.0) -> int:
        """SIGTERM, and SIGKILL to whatever is left after `timeout` seconds. Returns the exit status."""
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout)
        if self.process.poll() is None:
            self.process.kill()  # its children see their parent die, and end too
        return self.process.wait()


@contextlib.contextmanager
def tandem_serve(
    folder: Path,
    *flags: str,
    environment: Mapping[str, str] | None = None,
    wait: bool = True,
    timeout: float = 180.0,
) -> Iterator[ServerProcess]:
    """Run `tandem serve --port 0` and `flags` until the block ends; its log and ready file go to `folder`.

    Raises ServerEnded where it ends before it is ready, and TimeoutError after `timeout` seconds.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ready_file, log_file = folder / "ready.json", folder / "server.log"
    command = [sys.executable, "-m", "services.command", "serve", "--port", "0", "--ready-file", str(ready_file)]
    variables = {name: value for name, value in os.environ.items() if not name.startswith("TANDEM_")}
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    variables["TANDEM_LAUNCHER_PID"] = str(os.getpid())  # it ends with us, even where we are killed
    with log_file.open("wb") as log:
        process = subprocess.Popen(
            [*command, *flags],
            env=variables | dict(environment or {}),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    server = ServerProcess(process, log_file)
    try:
        if wait:
            _wait_until_ready(server, ready_file, timeout)
        yield server
    finally:
        server.stop()


def _wait_until_ready(server: ServerProcess, ready_file: Path, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while not ready_file.exists():
        status = server.process.poll()
        if status is not None:
            raise ServerEnded(f"tandem serve ended with exit code {status}:\n{server.log[-4000:]}")
        if time.monotonic() > deadline:
            raise TimeoutError(f"tandem serve was not ready after {timeout:g} s:\n{server.log[-4000:]}")
        time.sleep(_POLL_INTERVAL)
    ready = json.loads(ready_file.read_text(encoding="utf-8"))
    server.url, server.port = ready["url"], ready["port"]
    server.engines, server.frontends = ready["engines"], ready["frontends"]
