"""`tandem frontend --workers N`: several frontend processes of one pod, supervised, behind one port.

One Python process uses one core. Imports nothing of the engine, which a frontend's image does not have.
"""

import asyncio
import json
import os
import signal
import socket
import sys
import tempfile
from pathlib import Path
from typing import NoReturn

from services.frontend.settings import FrontendSettings
from services.launcher.environment import as_variables
from services.launcher.frontends import frontend_children
from services.launcher.lifetime import run_until_stopped
from services.launcher.sockets import PortTaken, listen
from services.launcher.supervisor import Child, say

_POLL_INTERVAL = 0.1  # seconds
# Over a worker's own time: it is the worker that decides how its streams end.
_EXTRA_GRACE = 10.0  # seconds


def run(settings: FrontendSettings) -> int:
    """Serve until SIGTERM or SIGINT (returns 0), or until the workers cannot go on (1)."""
    signal.signal(signal.SIGTERM, _exit_on_sigterm)  # until the event loop takes it over
    given = settings.model_dump(mode="json", include=settings.model_fields_set)
    environment = os.environ | as_variables(given)
    grace = settings.drain_delay + settings.shutdown_grace + _EXTRA_GRACE
    try:
        if settings.ready_file is not None:
            settings.ready_file.unlink(missing_ok=True)
        with (
            listen(settings.host, settings.port) as http_socket,
            tempfile.TemporaryDirectory(prefix="tandem-") as scratch,
        ):
            workers = frontend_children(environment, settings.workers, http_socket.fileno(), grace, Path(scratch))
            return asyncio.run(_serve(settings, workers, http_socket))
    except PortTaken as error:
        say(str(error))
        return 1
    except OSError as error:
        say(f"cannot serve on {settings.host}:{settings.port}: {error}")
        return 1


async def _serve(settings: FrontendSettings, workers: list[Child], http_socket: socket.socket) -> int:
    port: int = http_socket.getsockname()[1]

    async def until_ready() -> None:
        while not all(worker.ready_file.exists() for worker in workers):  # noqa: ASYNC110
            await asyncio.sleep(_POLL_INTERVAL)

    def announce() -> None:
        say(f"{len(workers)} frontend processes serve {settings.host}:{port}")
        if settings.ready_file is not None:
            pids = [worker.process.pid for worker in workers if worker.process is not None]
            partial = settings.ready_file.with_name(settings.ready_file.name + ".partial")
            partial.write_text(json.dumps({"port": port, "workers": pids}))
            partial.replace(settings.ready_file)

    return await run_until_stopped([workers], until_ready, announce, http_socket)


def _exit_on_sigterm(*_: object) -> NoReturn:
    sys.exit(128 + signal.SIGTERM)
