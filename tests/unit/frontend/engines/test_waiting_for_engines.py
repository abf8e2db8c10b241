"""Requests that no engine has room for, or is there for: who waits, for how long, and what the client is told."""

import time

from engine_fleet import Fleet, RecordingSink, long_prompt, run

from services.frontend.engines.in_process_engine import InProcessEngine, undisturbed_run
from services.frontend.generation import Generation
from shared.protocol import FinishReason
from shared.sampling_params import SamplingParams


def test_an_overloaded_engine_s_request_goes_to_each_other_once_and_then_gets_429() -> None:
    async def main() -> None:
        fleet = Fleet(3)
        await fleet.start()
        for address in fleet.addresses[:2]:
            fleet.transport.engines[address].overloaded = True
        _, sink = fleet.submit(long_prompt(3), max_tokens=3)
        _, second = fleet.submit(long_prompt(3), max_tokens=3)
        await fleet.run_to_the_end()
        assert sink.token_ids == second.token_ids == undisturbed_run(long_prompt(3), 3)
        fleet.transport.engines[fleet.addresses[2]].overloaded = True
        asked = sum(len(engine.added) for engine in fleet.transport.engines.values())
        _, refused = fleet.submit()
        await fleet.settle()
        assert [(error.status, error.retry_after) for error in refused.errors] == [(429, 1.0)]
        assert sum(len(engine.added) for engine in fleet.transport.engines.values()) == asked + 3
        fleet.assert_clean()

    run(main)


def test_a_stream_that_meets_only_full_engines_waits_for_room() -> None:
    async def main() -> None:
        fleet = Fleet(2)
        await fleet.start()
        prompt = long_prompt(6)
        generation, sink = fleet.submit(prompt, max_tokens=6)
        await fleet.step()
        first = fleet.engine_with(generation)
        second = next(address for address in fleet.addresses if address != first)
        fleet.transport.engines[second].overloaded = True
        fleet.transport.kill(first)
        await fleet.pass_time(4)
        assert sink.ends == 0
        fleet.transport.engines[second].overloaded = False
        await fleet.pass_time(0.5)
        await fleet.run_to_the_end()
        assert sink.token_ids == undisturbed_run(prompt, 6)
        fleet.assert_clean()

    run(main)


def test_a_stream_that_meets_only_full_engines_for_too_long_fails() -> None:
    async def main() -> None:
        fleet = Fleet(2)
        await fleet.start()
        generation, sink = fleet.submit(long_prompt(6), max_tokens=6)
        await fleet.step()
        first = fleet.engine_with(generation)
        for engine in fleet.transport.engines.values():
            engine.overloaded = True
        fleet.transport.kill(first)
        await fleet.pass_time(9)
        assert sink.ends == 0
        await fleet.pass_time(2)
        assert [error.status for error in sink.errors] == [503]
        fleet.assert_clean()

    run(main)


def test_without_any_engine_a_stream_waits_for_one_and_fails_after_the_time_out() -> None:
    async def main() -> None:
        fleet = Fleet(1, no_engine_timeout=10)
        await fleet.start()
        address = fleet.addresses[0]
        prompt = long_prompt(5)
        _, sink = fleet.submit(prompt, max_tokens=5)
        await fleet.step()
        fleet.transport.kill(address)
        await fleet.pass_time(9)
        assert sink.ends == 0
        fleet.transport.run(address, InProcessEngine())
        await fleet.run_to_the_end()
        assert sink.token_ids == undisturbed_run(prompt, 5)
        _, sink = fleet.submit(prompt, max_tokens=5)
        await fleet.step()
        fleet.transport.kill(address)
        await fleet.pass_time(10.5)
        assert [(error.status, error.retry_after) for error in sink.errors] == [(503, 5.0)]
        fleet.assert_clean()

    run(main)


def test_a_deadline_that_passes_while_no_engine_is_there_ends_the_request_as_an_engine_would() -> None:
    async def main() -> None:
        fleet = Fleet(1)
        await fleet.start()
        sink = RecordingSink()
        generation = Generation(
            "model", long_prompt(9), SamplingParams(max_tokens=9), sink, deadline=time.time() - 0.001
        )
        fleet.pool.submit(generation)
        fleet.transport.kill(fleet.addresses[0])
        await fleet.pass_time(0.5)
        assert sink.finish_reasons == [FinishReason.ABORT]
        fleet.assert_clean()

    run(main)


def test_an_abort_while_no_engine_has_the_request_ends_it() -> None:
    async def main() -> None:
        fleet = Fleet(1)
        await fleet.start()
        address = fleet.addresses[0]
        generation, sink = fleet.submit(long_prompt(9), max_tokens=9)
        await fleet.step()
        engine = fleet.transport.engines[address]
        fleet.transport.freeze(address)
        await fleet.pass_time(6)
        fleet.pool.abort(generation.request_id)
        fleet.pool.abort(generation.request_id)
        fleet.transport.thaw(address)
        await fleet.pass_time(1)
        assert fleet.pool.ready
        # The engine was lost with the request, and told of its end once it was back.
        assert engine.num_requests == 0
        assert sink.ends == 0
        fleet.assert_clean()

    run(main)
