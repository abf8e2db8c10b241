"""A pool over in-process engines, a clock that only the test moves, and sinks that write down what they get."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from services.frontend.engines.in_process import InProcessTransport
from services.frontend.engines.in_process_engine import InProcessEngine, undisturbed_run
from services.frontend.engines.pool import EnginePool
from services.frontend.generation import Generation, GenerationError
from services.frontend.settings import EnginePoolSettings, FrontendSettings
from shared.protocol import FinishReason, RequestOutput, Welcome
from shared.sampling_params import SamplingParams


def long_prompt(max_tokens: int, start: int = 0) -> list[int]:
    """A prompt whose run meets no eos before max_tokens."""
    return next([seed] for seed in range(start, 10_000) if len(undisturbed_run([seed], max_tokens + 1)) > max_tokens)


class RecordingSink:
    """`stop_after` tokens, it says that it has enough, as a stop string would make it."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.outputs: list[RequestOutput] = []
        self.token_ids: list[int] = []
        self.finish_reasons: list[FinishReason] = []
        self.errors: list[GenerationError] = []
        self.ends = 0
        self.late = 0
        self.stop_after = stop_after

    def accept(self, output: RequestOutput) -> bool:
        self.late += self.ends > 0
        self.outputs.append(output)
        self.token_ids += output.token_ids
        if output.finish_reason is not None:
            self.finish_reasons.append(output.finish_reason)
        over = output.finish_reason is not None
        over = over or (self.stop_after is not None and len(self.token_ids) >= self.stop_after)
        self.ends += over
        return over

    def fail(self, error: GenerationError) -> None:
        self.late += self.ends > 0
        self.errors.append(error)
        self.ends += 1


class Fleet:
    """`pool` and the engines behind the addresses e0, e1… Time moves in `pass_time` only."""

    def __init__(
        self, num_engines: int, check: Callable[[Welcome], str | None] = lambda welcome: None, **settings: Any
    ) -> None:
        self.now = 1000.0
        self.transport = InProcessTransport()
        self.addresses = [f"10.0.0.{index}:5555" for index in range(num_engines)]
        for address in self.addresses:
            self.transport.run(address, InProcessEngine())
        # The pool's own watch comes once an hour, that is never: the tests call tick.
        self.settings = FrontendSettings(
            **{"routing": "round_robin", "heartbeat_interval": 1.0, "heartbeat_timeout": 5.0, **settings}
        )
        pool_settings = EnginePoolSettings(engine_addresses=self.addresses)
        self.pool = EnginePool(
            "model", self.settings, pool_settings, check, transport=self.transport, clock=lambda: self.now
        )
        self.sinks: list[RecordingSink] = []

    async def start(self) -> None:
        self.pool.engines_found(set(self.addresses))
        await self.settle()

    async def settle(self) -> None:
        """Let every message that is under way arrive, and what it causes."""
        for _ in range(40):
            await asyncio.sleep(0)

    async def pass_time(self, seconds: float, heartbeats: bool = True) -> None:
        """Half a second after the other, as the pool's own watch does it."""
        for _ in range(round(seconds * 2)):
            self.now += 0.5
            if heartbeats:
                for engine in self.transport.engines.values():
                    engine.heartbeat()
            await self.settle()
            self.pool.tick()
            await self.settle()

    async def step(self) -> None:
        """Every engine makes a step; frozen ones do not."""
        await self.settle()
        for address, engine in self.transport.engines.items():
            if not self.transport.is_frozen(address):
                engine.step()
        await self.settle()

    async def run_to_the_end(self, steps: int = 200) -> None:
        for _ in range(steps):
            if not self.pool.num_requests:
                return
            await self.step()
            await self.pass_time(0.5)

    def submit(
        self, prompt: list[int] | None = None, max_tokens: int = 8, stop_after: int | None = None, **sampling: Any
    ) -> tuple[Generation, RecordingSink]:
        sink = RecordingSink(stop_after)
        self.sinks.append(sink)
        generation = Generation(
            "model", prompt or [len(self.sinks), 7, 3], SamplingParams(max_tokens=max_tokens, **sampling), sink
        )
        self.pool.submit(generation)
        return generation, sink

    def engine_with(self, generation: Generation) -> str:
        """The address of the engine that has the generation now."""
        request = self.pool._dispatcher.requests[generation.request_id]
        assert request.connection is not None
        return request.connection.address

    def assert_clean(self) -> None:
        """Nothing left on either side, and nobody broke the protocol."""
        assert self.pool.num_requests == 0
        assert self.pool._dispatcher._waiting == {}
        for connection in self.pool.connections.values():
            assert connection.in_flight == {}
        for engine in self.transport.engines.values():
            assert engine.violations == []
            assert engine.num_requests == 0
        for sink in self.sinks:
            assert sink.late == 0


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a test's coroutine; an exception in one of the loop's callbacks fails it too."""
    problems: list[dict[str, Any]] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: problems.append(context))
        await test()

    asyncio.run(main())
    assert problems == []
