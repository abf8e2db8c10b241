"""Grammars that wait for a process to compile them in, all with the same bound on its time. `checker` has two of these.

`compile_process.py` is the process.
"""

import asyncio
import contextlib
import logging
import os
import signal
import sys

import msgspec

from services.frontend.structured.frames import Verdict, frame, read_frame_soon
from services.frontend.structured.queue_by_size import QueueBySize, TooManyWait
from shared.structured_output import StructuredOutput

logger = logging.getLogger(__name__)

WALL_SECONDS = 10.0  # for a machine that has no time at all; CPU time is what is bounded


class CannotCheck(Exception):
    """There is no saying now whether the grammar can be served."""


class CompileLane:
    """Belongs to one event loop. Its processes start with the first grammar, or with `start`, and stay."""

    def __init__(self, cpu_seconds: float, processes: int, niceness: int) -> None:
        self.cpu_seconds = cpu_seconds
        self._arguments = (str(cpu_seconds), str(niceness))
        self._idle: list[asyncio.subprocess.Process] = []
        self._queue = QueueBySize(processes)
        self._closed = False

    async def start(self) -> None:
        """Start a process, so that the first grammar need not wait for it."""
        try:
            async with self._queue.turn(0):
                self._idle.append(await self._spawn())
        except (OSError, EOFError) as error:
            logger.warning("No process to check grammars in could be started yet: %s", error)

    async def judge(self, structured: StructuredOutput) -> Verdict:
        """Raises CannotCheck."""
        try:
            async with self._queue.turn(len(structured.value)):
                return await self._ask(structured)
        except TooManyWait as error:
            raise CannotCheck("too many grammars are being checked") from error

    async def close(self) -> None:
        """To be called when nobody waits any more."""
        self._closed = True
        while self._idle:
            process = self._idle.pop()
            if process.returncode is None:  # else its number may be another's by now
                await _end(process)

    async def _ask(self, structured: StructuredOutput) -> Verdict:
        process = None
        answered = False
        try:
            async with asyncio.timeout(WALL_SECONDS):
                process = await self._take_process()
                assert process.stdin is not None
                assert process.stdout is not None
                # The process needs none of the tags: they are the server's own.
                plain = StructuredOutput(kind=structured.kind, value=structured.value)
                process.stdin.write(frame(msgspec.msgpack.encode(plain)))
                await process.stdin.drain()
                data = await read_frame_soon(process.stdout)
                answered = True
                return msgspec.msgpack.decode(data, type=Verdict)
        except TimeoutError as error:
            raise CannotCheck("could not be checked in time") from error
        except (OSError, EOFError) as error:
            logger.error("The process that checks grammars ended, or cannot be started: %s", error)
            raise CannotCheck("cannot be checked now") from error
        finally:
            if process is not None:
                if answered and not self._closed:
                    self._idle.append(process)
                else:
                    await _end(process)

    async def _take_process(self) -> asyncio.subprocess.Process:
        while self._idle:
            process = self._idle.pop()
            if process.returncode is None:
                return process
        return await self._spawn()

    async def _spawn(self) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "services.frontend.structured.compile_process", *self._arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # it and its copies end together
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        try:
            assert process.stdout is not None
            await read_frame_soon(process.stdout)  # it has loaded what it needs
        except BaseException:
            await _end(process)
            raise
        return process


async def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
