"""Serves the app with uvicorn: binds, says when it is ready, and leaves in order on SIGTERM.

Leaving: not ready at once; after drain_delay (so that load balancers have noticed) no new connections; streams run
to their end, and what still runs after shutdown_grace ends with an error of its own. A second signal leaves at once.
"""

import asyncio
import contextlib
import gc
import json
import logging
import math
import os
import signal
import socket
import sys
from pathlib import Path
from types import FrameType

import uvicorn
import uvloop
from fastapi import FastAPI

from services.frontend.generation import GenerationError
from services.frontend.http.protocol import Protocol
from services.frontend.http.state import FrontendState
from services.frontend.settings import FrontendSettings
from services.frontend.thread_priority import run_soon

logger = logging.getLogger(__name__)

_BACKLOG = 2048
# Longer than load balancers keep idle connections (60 s is usual), so that they never write into one just closed.
_KEEP_ALIVE_SECONDS = 75
# A client whose machine is gone says nothing: seconds of silence before the kernel asks, and between its questions. It
# is lost, and its request given up, after so many milliseconds (Linux; elsewhere after so many questions). So is one
# that is there and takes nothing of what waits for it, which would be kept for ever.
_PROBE_OPTIONS = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 180_000}
# After the grace period streams are told their error; this is for clients that do not read it.
_FAREWELL_SECONDS = 5
# What the kernel takes beyond what is on its way to the client. By default that is some 4 MB a client: an answer
# would lie there in its first, small chunks, in memory that counts as this pod's, and the collector could merge none.
_UNSENT_BYTES = 64 * 1024
_SIGN_OF_LIFE_SECONDS = 2.0
# When Python looks for cycles of objects, of which requests leave none: rarely, since every stream waits meanwhile, for
# 100 ms at a thousand of them. So many objects have then come that did not soon go; with requests that come and go, 200
# in a second, that takes a minute.
_COLLECT_AFTER_OBJECTS = 1_000_000
# What a thread that makes a prompt may keep the interpreter for while the event loop waits for it.
_THREAD_SECONDS = 0.001


class CannotListen(Exception):
    """The address cannot be bound; the message says which, and why."""


def serve(app: FastAPI, settings: FrontendSettings) -> int:
    """Serve until a signal. Returns the exit status. Raises CannotListen."""
    listener = bind(settings.host, settings.port) if settings.listen_fd is None else inherited(settings.listen_fd)
    _set_connection_options(listener)
    config = uvicorn.Config(
        app,
        http=Protocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=math.ceil(settings.shutdown_grace) + _FAREWELL_SECONDS,
    )
    server = Server(config, settings, app.state.frontend, listener.getsockname()[1])
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            runner.run(server.serve(sockets=[listener]))
        except SystemExit as error:  # uvicorn's word for a lifespan that failed; it has logged why
            return error.code if isinstance(error.code, int) else 1
    return server.exit_status


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises CannotListen."""
    try:
        return socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=_BACKLOG
        )
    except OSError as error:
        raise CannotListen(
            f"cannot listen on {host}:{port}: {error.strerror or error}. Choose another --port or --host."
        ) from error


def inherited(descriptor: int) -> socket.socket:
    """A socket that the parent process has bound and listens on. Raises CannotListen."""
    try:
        return socket.socket(fileno=descriptor)
    except OSError as error:
        raise CannotListen(f"--listen-fd {descriptor} is no socket that was inherited: {error.strerror}") from error


def _set_connection_options(listener: socket.socket) -> None:
    # The connections that it accepts inherit them.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in {**_PROBE_OPTIONS, "TCP_NOTSENT_LOWAT": _UNSENT_BYTES}.items():
        if hasattr(socket, name) and listener.family != socket.AF_UNIX:
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class Server(uvicorn.Server):
    """uvicorn's server, with draining and the ready file."""

    def __init__(self, config: uvicorn.Config, settings: FrontendSettings, state: FrontendState, port: int) -> None:
        super().__init__(config)
        self.exit_status = 0
        self._settings = settings
        self._state = state
        self._port = port
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets=sockets)
        # What was loaded stays. A full collection would look at all of it, and hold every stream up meanwhile.
        gc.collect()
        gc.freeze()
        gc.set_threshold(_COLLECT_AFTER_OBJECTS)
        sys.setswitchinterval(_THREAD_SECONDS)
        run_soon()
        if self.started and self._settings.ready_file is not None:
            self._write_ready_file()
            self._loop.call_later(_SIGN_OF_LIFE_SECONDS, self._give_sign_of_life, self._settings.ready_file)
        if not self.should_exit:
            logger.info("Serving on http://%s:%d", self._settings.host, self._port)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal handler. Unlike uvicorn's it does not raise the signal again at the end: exit status 0."""
        if self._state.draining:
            self.force_exit = True
            self.should_exit = True
            return
        self._state.draining = True
        delay = self._settings.drain_delay if sig == signal.SIGTERM else 0.0
        logger.info("%s: not ready any more; connections are refused in %g seconds", signal.Signals(sig).name, delay)
        if self._loop is None:
            self.should_exit = True
        else:
            self._loop.call_soon_threadsafe(self._loop.call_later, delay, self._stop_accepting)

    def _stop_accepting(self) -> None:
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        farewell = GenerationError("this server is shutting down", 503, 1.0, reason="draining")
        timer = asyncio.get_running_loop().call_later(self._settings.shutdown_grace, self._state.fail_all, farewell)
        try:
            await super().shutdown(sockets=sockets)
        finally:
            timer.cancel()

    def _give_sign_of_life(self, ready_file: Path) -> None:
        """Touch the ready file, from the event loop: a launcher sees from outside that it turns."""
        with contextlib.suppress(OSError):
            os.utime(ready_file)
        if self._loop is not None:
            self._loop.call_later(_SIGN_OF_LIFE_SECONDS, self._give_sign_of_life, ready_file)

    def _write_ready_file(self) -> None:
        path = self._settings.ready_file
        assert path is not None
        # Whoever waits for it must never see half of it.
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            temporary.write_text(json.dumps({"port": self._port}))
            temporary.replace(path)
        except OSError as error:
            logger.error("cannot write the ready file %s: %s", path, error.strerror)
            self.exit_status = 1
            self.should_exit = True
