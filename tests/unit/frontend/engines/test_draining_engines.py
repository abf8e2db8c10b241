"""Engines that drain: what they have moves on without a loss, and they are told when nothing is left."""

from engine_fleet import Fleet, long_prompt, run

from services.frontend.engines.connection_state import ConnectionState
from services.frontend.engines.in_process_engine import InProcessEngine, undisturbed_run
from shared.protocol import Goodbye


def test_a_draining_engine_finishes_what_it_has_and_hands_the_rest_over() -> None:
    async def main() -> None:
        fleet = Fleet(2, max_failovers=0)
        await fleet.start()
        prompt = long_prompt(9)
        generation, sink = fleet.submit(prompt, max_tokens=9)
        await fleet.step()
        draining = fleet.engine_with(generation)
        fleet.transport.engines[draining].drain()
        await fleet.settle()
        other = next(address for address in fleet.addresses if address != draining)
        assert [fleet.engine_with(fleet.submit()[0]) for _ in range(3)] == [other] * 3
        await fleet.step()
        assert fleet.engine_with(generation) == draining
        fleet.transport.engines[draining].hand_over()
        await fleet.settle()
        assert fleet.engine_with(generation) == other
        fleet.transport.kill(draining)
        await fleet.run_to_the_end()
        # No loss is held against it, though none is allowed.
        assert sink.token_ids == undisturbed_run(prompt, 9)
        assert fleet.pool.counts.handovers == 1
        fleet.assert_clean()

    run(main)


def test_an_engine_that_drains_is_told_once_nothing_is_left_there_and_not_before() -> None:
    async def main() -> None:
        fleet = Fleet(2)
        await fleet.start()
        generation, sink = fleet.submit(long_prompt(6), max_tokens=6)
        await fleet.step()
        draining = fleet.engine_with(generation)
        other = next(address for address in fleet.addresses if address != draining)
        fleet.transport.engines[other].drain()
        await fleet.settle()
        # Nothing was there: it is told at once.
        assert not fleet.transport.engines[other].peers
        assert fleet.pool.connections[other].state is ConnectionState.PARTED
        fleet.transport.engines[draining].drain()
        await fleet.step()
        assert fleet.transport.engines[draining].peers
        await fleet.run_to_the_end()
        assert sink.finish_reasons
        assert not fleet.transport.engines[draining].peers
        assert fleet.pool.connections[draining].state is ConnectionState.PARTED
        fleet.assert_clean()

    run(main)


def test_an_abort_of_the_last_request_is_the_end_there_too() -> None:
    async def main() -> None:
        fleet = Fleet(1)
        await fleet.start()
        generation, _ = fleet.submit(max_tokens=50)
        await fleet.step()
        engine = fleet.transport.engines[fleet.addresses[0]]
        engine.drain()
        await fleet.settle()
        fleet.pool.abort(generation.request_id)
        await fleet.pass_time(0.5)
        assert not engine.peers
        fleet.assert_clean()

    run(main)


def test_silence_after_the_last_word_is_no_loss_and_the_next_engine_there_is_used() -> None:
    async def main() -> None:
        fleet = Fleet(1)
        await fleet.start()
        (address,) = fleet.addresses
        fleet.transport.engines[address].drain()
        await fleet.pass_time(20)
        assert fleet.pool.connections[address].state is ConnectionState.PARTED
        fleet.transport.kill(address)
        await fleet.pass_time(1)
        fleet.transport.run(address, InProcessEngine())
        await fleet.pass_time(2)
        assert fleet.pool.ready
        fleet.assert_clean()

    run(main)


def test_one_that_drains_when_it_is_found_is_left_in_peace() -> None:
    async def main() -> None:
        fleet = Fleet(1)
        engine = fleet.transport.engines[fleet.addresses[0]]
        engine.draining = True
        await fleet.start()
        assert not engine.peers
        engine.post(fleet.pool.boot_id, Goodbye("it still drains"))
        await fleet.pass_time(3)
        assert not fleet.pool.ready
        fleet.assert_clean()

    run(main)
