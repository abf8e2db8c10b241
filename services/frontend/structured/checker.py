"""Checks that a request's grammar can be served, before it is queued: in processes of its own, within bounds.

A grammar that was judged is remembered. `compile_process.py` does the judging, `compile_lane.py` has its processes.
"""

import asyncio
import logging
from collections import OrderedDict
from typing import Any

import msgspec

from services.frontend.structured.compile_lane import CannotCheck, CompileLane
from services.frontend.structured.frames import Verdict
from shared.structured_output import StructuredOutput

logger = logging.getLogger(__name__)

MAX_REMEMBERED = 1024
MAX_REMEMBERED_CHARACTERS = 16 * 1024 * 1024
# Five times what a schema of fifty properties takes. Those that need more wait among their like, so that the many that
# somebody makes on purpose keep nobody else's waiting for longer than this each.
QUICK_SECONDS = 0.015
PATIENT_PROCESSES = 2
QUICK_NICENESS, PATIENT_NICENESS = 5, 10  # streams come first


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
        self._lanes = [CompileLane(min(QUICK_SECONDS, cpu_seconds), 1, QUICK_NICENESS)]
        if cpu_seconds > QUICK_SECONDS:
            self._lanes.append(CompileLane(cpu_seconds, PATIENT_PROCESSES, PATIENT_NICENESS))
        self._starting: asyncio.Task[None] | None = None
        self._judging: dict[tuple[str, str], asyncio.Task[Verdict]] = {}
        self._verdicts: OrderedDict[tuple[str, str], Verdict] = OrderedDict()
        self._characters = 0

    def start(self) -> None:
        """Begin to start a process, so that the first grammar need not wait for it."""
        self._starting = asyncio.create_task(self._lanes[0].start())

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
        tasks: list[asyncio.Task[Any]] = [*self._judging.values()]
        if self._starting is not None:
            tasks.append(self._starting)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for lane in self._lanes:
            await lane.close()

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
        verdict = Verdict(timed_out=True)
        try:
            for lane in self._lanes:
                verdict = await lane.judge(structured)
                if not verdict.timed_out:
                    return verdict
        except CannotCheck as refusal:
            raise GrammarRefused(f"{refusal}; try again in a moment", status=503) from refusal
        logger.warning("A %s of %d characters was too much to compile", structured.kind, len(structured.value))
        return Verdict(error=f"is too complex: to compile it takes over {self._lanes[-1].cpu_seconds:g} s")
