"""Starts the children of `tandem serve`, watches them, restarts one that dies later, and stops them all.

A child that ends before everything was ready ends the whole, with its own message on the screen: a model that
cannot be loaded will not load the second time. One that dies later is restarted, ever more slowly, until it has
died too often. No child outlives the launcher: each has a process group of its own, which is killed after its
grace, and a parent-death signal (`parent_death`) for when the launcher itself is killed.
"""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from services.launcher.parent_death import PARENT_VARIABLE

MAX_RESTARTS = 5  # of one child, within RESTART_WINDOW
RESTART_WINDOW = 600.0  # seconds
MAX_BACKOFF = 30.0  # seconds
HANG_POLL_INTERVAL = 5.0  # seconds


@dataclass(slots=True)
class Child:
    """One process. `ready_file` is what it writes once it serves; `grace` is in seconds, from SIGTERM to SIGKILL.
    `on_end` is called with the id of each process that has ended. A child with a `hang_timeout`, in seconds, touches
    its ready file every few seconds, and is killed after so long without."""

    name: str
    command: list[str]
    environment: dict[str, str]
    ready_file: Path
    grace: float
    pass_fds: tuple[int, ...] = ()
    process: asyncio.subprocess.Process | None = None
    restarts: deque[float] = field(default_factory=deque)
    on_end: Callable[[int], None] = lambda pid: None
    hang_timeout: float | None = None

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.returncode is None

    async def start(self) -> None:
        self.ready_file.unlink(missing_ok=True)
        self.process = await asyncio.create_subprocess_exec(
            *self.command,
            env=self.environment | {PARENT_VARIABLE: str(os.getpid())},
            stdin=asyncio.subprocess.DEVNULL,
            pass_fds=self.pass_fds,
            start_new_session=True,  # a Ctrl-C in the terminal is the launcher's; it ends the children in order
        )

    def last_sign(self) -> float | None:
        """When it last touched its ready file, by the file system's clock; None before it was ready."""
        try:
            return self.ready_file.stat().st_mtime
        except OSError:
            return None

    def signal(self, number: signal.Signals) -> None:
        """Send `number` to the child and to whatever it started."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)


class Supervisor:
    """Owns the children. `failure` is done, with a message, once the whole cannot go on."""

    def __init__(self, stop_order: list[list[Child]]) -> None:
        """`stop_order`: those that are stopped together, group after group; started in the opposite order."""
        self._stop_order = stop_order
        self._everything_was_ready = False
        self._stopping = False
        self._watchers: list[asyncio.Task[None]] = []
        self.failure: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def start(self) -> None:
        for group in reversed(self._stop_order):
            for child in group:
                await child.start()
                watcher = asyncio.create_task(self._watch(child), name=f"watch {child.name}")
                watcher.add_done_callback(self._watcher_ended)
                self._watchers.append(watcher)

    def everything_is_ready(self) -> None:
        """From now on a child that ends is restarted."""
        self._everything_was_ready = True

    async def stop(self) -> None:
        """End every child: SIGTERM, its grace, SIGKILL. Returns when none is left."""
        self._stopping = True
        for group in self._stop_order:
            await asyncio.gather(*(self._end(child) for child in group))
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)

    def kill(self) -> None:
        """End every child now; `stop`, which is waiting for them, then returns."""
        for child in (child for group in self._stop_order for child in group):
            child.signal(signal.SIGKILL)

    async def _end(self, child: Child) -> None:
        if child.running and child.process is not None:
            child.signal(signal.SIGTERM)
            try:
                await asyncio.wait_for(child.process.wait(), child.grace)
            except TimeoutError:
                say(f"{child.name} did not end within {child.grace:g} s of SIGTERM: it is killed")
                child.signal(signal.SIGKILL)
                await child.process.wait()
        child.signal(signal.SIGKILL)  # what it may have left behind in its group

    async def _watch(self, child: Child) -> None:
        while True:
            status = await self._end_of(child)
            if self._stopping:
                return
            child.signal(signal.SIGKILL)
            assert child.process is not None
            child.on_end(child.process.pid)
            ended = f"{child.name} {describe_exit(status)}"
            if not self._everything_was_ready:
                self._fail(f"{ended} before it was ready; its own message is above")
                return
            now = time.monotonic()
            while child.restarts and child.restarts[0] < now - RESTART_WINDOW:
                child.restarts.popleft()
            if len(child.restarts) >= MAX_RESTARTS:
                self._fail(f"{ended}, for the {MAX_RESTARTS + 1}th time in {RESTART_WINDOW / 60:g} minutes: giving up")
                return
            backoff = min(MAX_BACKOFF, 0.5 * 2 ** len(child.restarts))
            child.restarts.append(now)
            say(f"{ended}; it is started again in {backoff:g} s (restart {len(child.restarts)} of {MAX_RESTARTS})")
            await asyncio.sleep(backoff)
            if self._stopping:
                return
            await child.start()

    async def _end_of(self, child: Child) -> int:
        """Wait for the child's process, and end it where it hangs. Returns its exit status."""
        assert child.process is not None
        if child.hang_timeout is None:
            return await child.process.wait()
        looked = moved = time.monotonic()
        sign: float | None = None
        while True:
            with contextlib.suppress(TimeoutError):
                return await asyncio.wait_for(child.process.wait(), HANG_POLL_INTERVAL)
            now, last_sign = time.monotonic(), child.last_sign()
            # Where this process was held up too, the child has had no more time than it.
            if last_sign is None or last_sign != sign or now - looked > 2 * HANG_POLL_INTERVAL:
                sign, moved = last_sign, now
            elif now - moved > child.hang_timeout and not self._stopping:
                say(f"{child.name} has given no sign of life for {now - moved:.0f} s: it is killed")
                child.signal(signal.SIGKILL)
                moved = now
            looked = now

    def _watcher_ended(self, watcher: asyncio.Task[None]) -> None:
        error = None if watcher.cancelled() else watcher.exception()
        if error is not None:
            self._fail(f"{watcher.get_name()}: {error!r}")

    def _fail(self, message: str) -> None:
        if not self.failure.done():
            self.failure.set_result(message)


def describe_exit(status: int) -> str:
    """A process's end in words; a negative status is a signal's number."""
    if status < 0:
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(-status).name}"
        return f"was killed by signal {-status}"
    return f"ended with exit code {status}"


def say(text: str) -> None:
    print(f"tandem: {text}", file=sys.stderr, flush=True)
