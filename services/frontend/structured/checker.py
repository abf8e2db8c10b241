"""Checks that a request's grammar can be served, before it is queued: in processes of its own, within bounds.

A grammar that was judged is remembered. `compile_process.py` does the judging.
"""

import asyncio
import contextlib
import logging
import os
import sys
from collections import OrderedDict
from typing import Any

import msgspec

from services.frontend.structured.frames import Verdict, frame, read_frame_soon
from shared.structured_output import StructuredOutput

logger = logging.getLogger(__name__)

MAX_REMEMBERED = 1024
MAX_REMEMBERED_CHARACTERS = 16 * 1024 * 1024
PROCESSES = 2
MAX_WAITING = 64  # requests that wait for a process
WALL_SECONDS = 10.0  # for a machine that has no time at all; CPU time is what is bounded


class GrammarRefused(Exception):
    """`place` is a path inside the value, empty where it is the value as a whole. `status` is 400 for the client's
    faults, 503 where the server could not say."""

    def __init__(self, message: str, place: str = "", status: int = 400) -> None:
        super().__init__(message)
        self.message = message
        self.place = place
        self.status = status


class GrammarChecker:
    """Belongs to one event loop. Its processes start with the first grammar, or with `start`."""

    def __init__(self, max_bytes: int, cpu_seconds: float) -> None:
        self._max_bytes = max_bytes
        self._cpu_seconds = cpu_seconds
        self._idle: list[asyncio.subprocess.Process] = []
        self._free = asyncio.Semaphore(PROCESSES)
        self._waiting = 0
        self._closed = False
        self._starting: asyncio.Task[None] | None = None
        self._judging: dict[tuple[str, str], asyncio.Task[Verdict]] = {}
        self._verdicts: OrderedDict[tuple[str, str], Verdict] = OrderedDict()
        self._characters = 0

    def start(self) -> None:
        """Begin to start a process, so that the first grammar need not wait for it."""
        self._starting = asyncio.create_task(self._start())

    async def check(self, structured: StructuredOutput) -> StructuredOutput:
        """What to send to the engine. Raises GrammarRefused."""
        try:
            length = len(structured.value.encode())
        except UnicodeEncodeError as error:
            raise GrammarRefused("is not valid Unicode: it holds a lone surrogate") from error
        if length > self._max_bytes:
            raise GrammarRefused(f"has {length} bytes; this server takes {self._max_bytes} (--max-grammar-bytes)")
        key = (structured.kind, structured.value)
        verdict = self._verdicts.get(key)
        if verdict is None:
            verdict = await self._judge_once(key, structured)
        else:
            self._verdicts.move_to_end(key)
        if verdict.error:
            raise GrammarRefused(verdict.error, verdict.place)
        return msgspec.structs.replace(structured, value=verdict.value)

    async def close(self) -> None:
        self._closed = True
        tasks: list[asyncio.Task[Any]] = [*self._judging.values()]
        if self._starting is not None:
            tasks.append(self._starting)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        while self._idle:
            await _end(self._idle.pop())

    async def _start(self) -> None:
        try:
            async with self._free:
                self._idle.append(await self._spawn())
        except (OSError, EOFError) as error:
            logger.warning("No process to check grammars in could be started yet: %s", error)

    def _remember(self, key: tuple[str, str], verdict: Verdict) -> None:
        if key not in self._verdicts:
            self._characters += len(key[1])
        self._verdicts[key] = verdict
        while len(self._verdicts) > MAX_REMEMBERED or self._characters > MAX_REMEMBERED_CHARACTERS:
            (_, value), _ = self._verdicts.popitem(last=False)
            self._characters -= len(value)

    async def _judge_once(self, key: tuple[str, str], structured: StructuredOutput) -> Verdict:
        """Many may send the same new grammar at once, as after a restart: one of them has it judged for all."""
        judging = self._judging.get(key)
        if judging is None:

            async def judge() -> Verdict:
                verdict = await self._judge(structured)
                self._remember(key, verdict)
                return verdict

            def judged(task: asyncio.Task[Verdict]) -> None:
                del self._judging[key]
                if not task.cancelled():
                    task.exception()  # whoever asked may be gone

            judging = self._judging[key] = asyncio.create_task(judge())
            judging.add_done_callback(judged)
        return await asyncio.shield(judging)

    async def _judge(self, structured: StructuredOutput) -> Verdict:
        if self._waiting >= MAX_WAITING:
            raise GrammarRefused("too many grammars are being checked; try again in a moment", status=503)
        self._waiting += 1
        try:
            async with self._free:
                return await self._ask(structured)
        finally:
            self._waiting -= 1

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
                try:
                    await process.stdin.drain()
                    data = await read_frame_soon(process.stdout)
                except (OSError, EOFError):
                    logger.warning("A %s of %d characters was too much to compile", plain.kind, len(plain.value))
                    limit = f"{self._cpu_seconds:g} s"
                    return Verdict(
                        error=f"is too complex: to compile it takes over {limit} or too much memory, or it nests too "
                        "deeply"
                    )
                answered = True
                return msgspec.msgpack.decode(data, type=Verdict)
        except TimeoutError as error:
            raise GrammarRefused("could not be checked in time; try again in a moment", status=503) from error
        except (OSError, EOFError) as error:
            logger.error("No process to check grammars in can be started: %s", error)
            raise GrammarRefused("cannot be checked now; try again in a moment", status=503) from error
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
            *(sys.executable, "-m", "services.frontend.structured.compile_process", str(self._cpu_seconds)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
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
        process.kill()
    await process.wait()
