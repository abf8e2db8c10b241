"""All choices of one HTTP request: submitted together, read together, and ended together."""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from services.frontend.generation import Generation, GenerationError
from services.frontend.http.generation_trace import GenerationRecord
from services.frontend.output.collector import Collector, Delta
from shared.protocol import FinishReason

_GIVEN_UP = {
    FinishReason.ABORT: GenerationError("the request was given up before it was finished", 503, 1.0),
    FinishReason.ERROR: GenerationError("the engine failed on this request", 500),
    FinishReason.OVERLOADED: GenerationError("the engines are full; try again in a moment", 429, 1.0),
    FinishReason.HANDED_OVER: GenerationError("the engine left before the request was finished", 503, 1.0),
}


# For so long at a time a request's choices keep the event loop from everything else.
PART_SECONDS = 0.002


class Submits(Protocol):
    """What is needed of an engine pool here."""

    def submit(self, generation: Generation) -> None: ...

    def abort(self, request_id: int) -> None: ...


class Choices:
    """`generations[i].sink` puts into `collector` under index i. `close` must be called, whatever happens."""

    def __init__(
        self,
        pool: Submits,
        generations: Sequence[Generation],
        collector: Collector,
        timeout: float | None = None,
        record: GenerationRecord | None = None,
    ) -> None:
        self.error: GenerationError | None = None
        self.record = record  # where the request is traced
        self.finish_reasons: list[FinishReason] = []  # in the order in which choices finished
        self._pool = pool
        self._generations = generations
        self._collector = collector
        self._running = set(range(len(generations)))
        self._submitted = 0
        self._timeout = timeout
        self._timer: asyncio.TimerHandle | None = None

    async def submit(self) -> None:
        """Send all of them to the engines, or none. Many are sent in parts, so that other requests need not wait.
        Raises GenerationError."""
        now = time.time()
        part_began = time.perf_counter()
        try:
            for generation in self._generations:
                generation.arrival_time = now
                if self._timeout is not None:
                    generation.deadline = now + self._timeout
                self._pool.submit(generation)
                self._submitted += 1
                if time.perf_counter() - part_began > PART_SECONDS:
                    await asyncio.sleep(0)
                    part_began = time.perf_counter()
        except BaseException:
            self.close()
            raise
        if self._timeout is not None:
            # The engine keeps the deadline too, but an engine that hangs would not.
            self._timer = asyncio.get_running_loop().call_later(self._timeout, self.fail, self._too_late())

    @property
    def generations(self) -> Sequence[Generation]:
        return self._generations

    @property
    def done(self) -> bool:
        """Every choice has finished, or `error` is set and nothing more comes."""
        return not self._running or self.error is not None

    async def next(self) -> list[tuple[int, Delta]]:
        """Wait for what the choices have made since the last call. Where one has failed, `error` is set, and what
        was made before it is still returned; its finish reason then is none that a client may see."""
        return [] if self.done else self._looked_at(await self._collector.get())

    def take(self, wake: Callable[[], None] | None = None) -> list[tuple[int, Delta]]:
        """As `next`, without waiting: what there is. `wake` is called once, as soon as there is more."""
        return [] if self.done else self._looked_at(self._collector.take(wake))

    def notify(self, wake: Callable[[], None] | None) -> None:
        """Have `wake` called once, as soon as `take` would give something."""
        self._collector.notify(wake)

    def _looked_at(self, deltas: list[tuple[int, Delta]]) -> list[tuple[int, Delta]]:
        for index, delta in deltas:
            if delta.error is not None:
                self.error = self.error or delta.error
            elif delta.finish_reason is not None:
                self._running.discard(index)
                self.finish_reasons.append(delta.finish_reason)
                if delta.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH):
                    self.error = self.error or self._given_up(delta.finish_reason)
                    delta.finish_reason = None
        if not deltas and self._collector.done and self.error is None:
            self.error = GenerationError("the request ended without a finish reason", 500)
        return deltas

    def fail(self, error: GenerationError) -> None:
        """End the request with an error: the reader of `next` wakes up."""
        self._collector.fail(error)

    def close(self) -> None:
        """Have the engines stop whatever still runs. Does nothing the second time."""
        if self._timer is not None:
            self._timer.cancel()
        for index, generation in enumerate(self._generations[: self._submitted]):
            if index in self._running:
                self._pool.abort(generation.request_id)
        self._running.clear()

    def _given_up(self, reason: FinishReason) -> GenerationError:
        if reason is FinishReason.ABORT and self._timeout is not None:
            return self._too_late()
        return _GIVEN_UP.get(reason, _GIVEN_UP[FinishReason.ERROR])

    def _too_late(self) -> GenerationError:
        return GenerationError(f"the request was not finished within its timeout of {self._timeout:g} seconds", 504)
