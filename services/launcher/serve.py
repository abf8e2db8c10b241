"""`tandem serve`: engines and frontends as processes on loopback, for a laptop and for tests.

`supervisor` keeps the processes; here is what to start, when all of it is ready, and when to stop.
"""

import asyncio
import json
import os
import shlex
import signal
import socket
import sys
import tempfile
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NoReturn

from services.engine.model.cpu_threads import usable_threads
from services.engine.settings import EngineSettings
from services.frontend.settings import FrontendSettings
from services.launcher.frontends import frontend_children
from services.launcher.lifetime import run_until_stopped
from services.launcher.settings import ServeSettings, child_environment
from services.launcher.smollm2 import NAME as DEFAULT_MODEL
from services.launcher.smollm2 import ModelFetchError, ensure_smollm2
from services.launcher.sockets import PortTaken, ReservedPorts, answers_ready, listen, reachable_host
from services.launcher.supervisor import Child, say

_POLL_INTERVAL = 0.25  # seconds
_PROGRESS_INTERVAL = 10.0  # seconds
# Over the child's own grace and what it needs to end afterwards: it is the child that decides how its requests end.
_EXTRA_GRACE = 30.0  # seconds


def run(settings: ServeSettings) -> int:
    """Serve until Ctrl-C or SIGTERM (returns 0), or until it cannot go on (1). Leaves no process behind."""
    signal.signal(signal.SIGTERM, _exit_on_sigterm)  # until the event loop takes it over
    try:
        if settings.ready_file:
            settings.ready_file.unlink(missing_ok=True)
        with listen(settings.host, settings.port) as http_socket:
            settings = _with_default_model(settings)
            with (
                tempfile.TemporaryDirectory(prefix="tandem-") as scratch,
                _link_ports(settings) as link_ports,
                _probe_ports(settings) as probe_ports,
                _traces(settings) as tracing_variables,
            ):
                engines = _engines(settings, link_ports.ports, probe_ports.ports, Path(scratch))
                frontends = _frontends(settings, engines, http_socket.fileno(), Path(scratch))
                for child in [*engines, *frontends]:
                    child.environment |= tracing_variables
                return asyncio.run(_serve(settings, engines, frontends, http_socket))
    except (PortTaken, ModelFetchError) as error:
        say(str(error))
        return 1
    except OSError as error:
        say(f"cannot serve on {settings.host}:{settings.port}: {error}")
        return 1
    except KeyboardInterrupt:
        return 130


def _with_default_model(settings: ServeSettings) -> ServeSettings:
    if settings.model:
        return settings
    defaults: dict[str, Any] = {"model": str(ensure_smollm2())}
    if not settings.served_model_name:
        defaults["served_model_name"] = [DEFAULT_MODEL, f"HuggingFaceTB/{DEFAULT_MODEL}"]
    return settings.model_copy(update=defaults)


def _link_ports(settings: ServeSettings) -> ReservedPorts:
    first = settings.link_port if "link_port" in settings.model_fields_set else None
    return ReservedPorts(settings.engines, first, settings.link_host)


def _probe_ports(settings: ServeSettings) -> ReservedPorts:
    first = settings.probe_port if "probe_port" in settings.model_fields_set else None
    return ReservedPorts(settings.engines, first, settings.probe_host)


def _traces(settings: ServeSettings) -> AbstractContextManager[dict[str, str]]:
    if settings.trace is None:
        return nullcontext({})
    from services.launcher.trace_console import trace_console

    return trace_console()


def _engines(settings: ServeSettings, link_ports: list[int], probe_ports: list[int], scratch: Path) -> list[Child]:
    threads = _threads_per_engine(settings)
    engines = []
    for index in range(settings.engines):
        ready_file = scratch / f"engine-{index}.json"
        overrides = {
            "link_port": link_ports[index],
            "probe_port": probe_ports[index],
            "threads": threads,
            "ready_file": str(ready_file),
        }
        environment = child_environment(settings, EngineSettings, overrides)
        grace = _grace(settings, EngineSettings)
        engines.append(Child(f"engine {index}", _command("engine"), environment, ready_file, grace))
    return engines


def _threads_per_engine(settings: ServeSettings) -> int | None:
    """None: as the engine itself decides, which obeys OMP_NUM_THREADS."""
    if settings.threads is not None or os.environ.get("OMP_NUM_THREADS"):
        return settings.threads
    # Two engines with a thread for every core would spin against each other, and against the frontends.
    return max(1, usable_threads() // settings.engines)


def _frontends(settings: ServeSettings, engines: list[Child], listen_fd: int, scratch: Path) -> list[Child]:
    addresses = [f"{settings.link_host}:{engine.environment['TANDEM_LINK_PORT']}" for engine in engines]
    environment = child_environment(settings, FrontendSettings, {"engine_addresses": addresses})
    grace = settings.drain_delay + _grace(settings, FrontendSettings)
    return frontend_children(environment, settings.frontends, listen_fd, grace, scratch)


async def _serve(
    settings: ServeSettings, engines: list[Child], frontends: list[Child], http_socket: socket.socket
) -> int:
    port: int = http_socket.getsockname()[1]

    async def until_ready() -> None:
        await _wait_until_ready(settings, engines, frontends, port)

    def announce() -> None:
        _announce(settings, engines, frontends, port)

    return await run_until_stopped([frontends, engines], until_ready, announce, http_socket)


async def _wait_until_ready(settings: ServeSettings, engines: list[Child], frontends: list[Child], port: int) -> None:
    started = last_said = time.monotonic()
    say(f"loading the model {settings.model} …")
    host = reachable_host(settings.host)
    # The port reaches whichever frontend takes the connection: with several, one good answer is not enough.
    answers_wanted = 1 if len(frontends) == 1 else 8 * len(frontends)
    answers = 0
    while answers < answers_wanted:
        waiting_for = [child.name for child in engines + frontends if not child.ready_file.exists()]
        if not waiting_for and await answers_ready(host, port):
            answers += 1
            continue
        answers = 0
        await asyncio.sleep(_POLL_INTERVAL)
        if time.monotonic() - last_said > _PROGRESS_INTERVAL:
            last_said = time.monotonic()
            what = ", ".join(waiting_for) or "the frontends' first answer from an engine"
            say(f"still waiting for {what} ({last_said - started:.0f} s)")


def _announce(settings: ServeSettings, engines: list[Child], frontends: list[Child], port: int) -> None:
    host = reachable_host(settings.host)
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    model = settings.served_model_name[0] if settings.served_model_name else settings.model
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    body = json.dumps({"model": model, "messages": messages, "temperature": 0})
    key = " \\\n    -H 'Authorization: Bearer YOUR_KEY'" if settings.api_key or settings.api_key_file else ""
    processes = (
        f"{len(frontends)} frontend{'s' * (len(frontends) > 1)}, {len(engines)} engine{'s' * (len(engines) > 1)}"
    )
    print(
        f"\nReady: {model} on {url} ({processes}; Ctrl-C stops them). Try it:\n\n"
        f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json'{key} \\\n    -d {shlex.quote(body)}\n",
        flush=True,
    )
    if settings.ready_file:
        _write_ready_file(settings.ready_file, url, port, engines, frontends)


def _write_ready_file(path: Path, url: str, port: int, engines: list[Child], frontends: list[Child]) -> None:
    def described(children: list[Child]) -> list[dict[str, Any]]:
        return [
            {"pid": child.process.pid, **json.loads(child.ready_file.read_text())}
            for child in children
            if child.process is not None
        ]

    content = {"url": url, "port": port, "engines": described(engines), "frontends": described(frontends)}
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(content))
    partial.replace(path)  # whoever waits for the file finds it whole


def _grace(settings: ServeSettings, service: type[EngineSettings] | type[FrontendSettings]) -> float:
    """Seconds from SIGTERM to SIGKILL: more than the service's own, which both call shutdown_grace."""
    if "shutdown_grace" in settings.model_fields_set:
        return settings.shutdown_grace + _EXTRA_GRACE
    return service.model_fields["shutdown_grace"].default + _EXTRA_GRACE


def _command(service: str) -> list[str]:
    return [sys.executable, "-m", "services.command", service]


def _exit_on_sigterm(*_: object) -> NoReturn:
    sys.exit(128 + signal.SIGTERM)
