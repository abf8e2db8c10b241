"""Any mix of deaths, freezes, cuts, drains, full engines, aborts and steps: each stream is an undisturbed run's."""

import asyncio
from typing import Any

import pytest
from engine_fleet import Fleet, RecordingSink
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.frontend.engines.in_process_engine import InProcessEngine, undisturbed_run
from services.frontend.generation import Generation, GenerationError

NUM_ENGINES = 3
indexes = st.integers(0, NUM_ENGINES - 1)


class EnginesComeAndGo(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.problems: list[dict[str, Any]] = []
        self.runner.get_loop().set_exception_handler(lambda loop, context: self.problems.append(context))
        # No stream may fail, however often its engines die and however long it waits.
        self.fleet = self.runner.run(self._start())
        self.streams: list[tuple[Generation, RecordingSink, int]] = []
        self.aborted: set[int] = set()
        self.dead: set[str] = set()

    async def _start(self) -> Fleet:
        fleet = Fleet(NUM_ENGINES, max_failovers=10_000, no_engine_timeout=1e9)
        await fleet.start()
        return fleet

    def _alive(self, index: int) -> str | None:
        address = self.fleet.addresses[index]
        return None if address in self.dead else address

    @rule(
        prompt=st.lists(st.integers(1, 49), min_size=1, max_size=4), max_tokens=st.integers(1, 12), stops=st.booleans()
    )
    def submit(self, prompt: list[int], max_tokens: int, stops: bool) -> None:
        async def act() -> None:
            stop_after = max(1, max_tokens // 2) if stops else None
            if not self.fleet.pool.ready:
                with pytest.raises(GenerationError, match="is ready"):
                    self.fleet.submit(prompt, max_tokens)
                self.fleet.sinks.pop()
                return
            generation, sink = self.fleet.submit(prompt, max_tokens, stop_after, logprobs=0, prompt_logprobs=0)
            self.streams.append((generation, sink, max_tokens))

        self.runner.run(act())

    @rule(turns=st.integers(0, 6))
    def let_messages_travel(self, turns: int) -> None:
        async def act() -> None:
            for _ in range(turns):
                await asyncio.sleep(0)

        self.runner.run(act())

    @rule(index=indexes)
    def step(self, index: int) -> None:
        address = self._alive(index)
        if address is not None and not self.fleet.transport.is_frozen(address):
            self.fleet.transport.engines[address].step()

    @rule()
    def step_all(self) -> None:
        self.runner.run(self.fleet.step())

    @rule(seconds=st.sampled_from([0.5, 2.0, 6.0]))
    def pass_time(self, seconds: float) -> None:
        self.runner.run(self.fleet.pass_time(seconds))

    @rule(index=indexes)
    def kill(self, index: int) -> None:
        address = self._alive(index)
        if address is not None:
            self.fleet.transport.kill(address)
            self.dead.add(address)

    @precondition(lambda self: self.dead)
    @rule(index=indexes)
    def restart(self, index: int) -> None:
        address = self.fleet.addresses[index]
        if address in self.dead:
            self.dead.remove(address)
            self.fleet.transport.run(address, InProcessEngine())

    @rule(index=indexes)
    def freeze(self, index: int) -> None:
        address = self._alive(index)
        if address is not None:
            self.fleet.transport.freeze(address)

    @rule(index=indexes)
    def thaw(self, index: int) -> None:
        self.fleet.transport.thaw(self.fleet.addresses[index])

    @rule(index=indexes)
    def cut(self, index: int) -> None:
        address = self._alive(index)
        if address is not None:
            self.fleet.transport.cut(address)

    @rule(index=indexes)
    def forget_frontends(self, index: int) -> None:
        address = self._alive(index)
        if address is not None:
            self.fleet.transport.engines[address].forget_frontends()

    @rule(index=indexes, drops=st.booleans())
    def drop_at_hello(self, index: int, drops: bool) -> None:
        address = self._alive(index)
        if address is not None:
            self.fleet.transport.engines[address].drops_at_hello = drops

    @rule(index=indexes, hands_over=st.booleans())
    def drain(self, index: int, hands_over: bool) -> None:
        address = self._alive(index)
        if address is not None:
            self.fleet.transport.engines[address].drain()
            if hands_over:
                self.fleet.transport.engines[address].hand_over()

    @rule(index=indexes, overloaded=st.booleans())
    def overload(self, index: int, overloaded: bool) -> None:
        address = self._alive(index)
        if address is not None:
            self.fleet.transport.engines[address].overloaded = overloaded

    @rule(index=indexes, data=st.binary(max_size=20))
    def send_rubbish(self, index: int, data: bytes) -> None:
        address = self._alive(index)
        # A tag that only other kinds of message have, so that rubbish is never valid by accident.
        if address is not None:
            self.fleet.transport.engines[address].send(self.fleet.pool.boot_id, b"\x91\x7f" + data)

    @precondition(lambda self: self.streams)
    @rule(choice=st.integers(0, 1000))
    def abort(self, choice: int) -> None:
        generation, sink, _ = self.streams[choice % len(self.streams)]

        async def act() -> None:
            self.fleet.pool.abort(generation.request_id)

        self.runner.run(act())
        if not sink.ends:
            self.aborted.add(generation.request_id)

    @invariant()
    def every_stream_is_so_far_an_undisturbed_one(self) -> None:
        assert self.problems == []
        for generation, sink, max_tokens in self.streams:
            expected = undisturbed_run(generation.prompt_token_ids, max_tokens)
            assert sink.token_ids == expected[: len(sink.token_ids)]
            assert sink.ends <= 1
            assert sink.late == 0
            assert sum(output.prompt_logprobs is not None for output in sink.outputs) <= 1
            assert sum(output.cached_tokens is not None for output in sink.outputs) <= 1
            assert all(len(output.logprobs or []) == len(output.token_ids) for output in sink.outputs)

    def teardown(self) -> None:
        try:
            self.runner.run(self._all_engines_well())
            for generation, sink, max_tokens in self.streams:
                if generation.request_id in self.aborted:
                    assert sink.ends == 0
                elif not sink.errors:
                    expected = undisturbed_run(generation.prompt_token_ids, max_tokens)
                    assert sink.token_ids == expected[: sink.stop_after]
                    assert sink.ends == 1
                else:
                    # Only one that had brought nothing yet may be turned away.
                    assert [error.status for error in sink.errors] == [429]
                    assert sink.token_ids == []
            self.fleet.assert_clean()
            self.every_stream_is_so_far_an_undisturbed_one()
        finally:
            self.runner.close()

    async def _all_engines_well(self) -> None:
        for address in self.fleet.addresses:
            self.fleet.transport.thaw(address)
            engine = self.fleet.transport.engines.get(address)
            if engine is None or engine.draining:
                if engine is not None:
                    self.fleet.transport.kill(address)
                self.fleet.transport.run(address, InProcessEngine())
            else:
                engine.overloaded = False
        await self.fleet.pass_time(8)
        await self.fleet.run_to_the_end()
        await self.fleet.pass_time(1)


TestEnginesComeAndGo = EnginesComeAndGo.TestCase
TestEnginesComeAndGo.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
