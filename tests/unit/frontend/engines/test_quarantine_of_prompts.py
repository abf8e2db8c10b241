"""A prompt that engines died under is refused for a while, here and by every engine, whichever frontend sends it."""

import pytest
from engine_fleet import Fleet, run
from test_trials import crash, long_prompts

from services.frontend.generation import Generation, GenerationError
from shared.protocol import pack_token_ids
from shared.quarantine import prompt_fingerprint

SECONDS = 100.0
(POISON, HARMLESS) = long_prompts(2)
FINGERPRINT = prompt_fingerprint(pack_token_ids(POISON))


async def kill_engines_with(fleet: Fleet, generation: Generation) -> int:
    """Every engine that has it dies, until it is given up. How many did."""
    deaths = 0
    while request := fleet.pool._dispatcher.requests.get(generation.request_id):
        assert request.connection is not None
        deaths += 1
        await crash(fleet, request.connection.address)
        await fleet.pass_time(1)
    return deaths


def test_the_same_prompt_is_refused_for_a_while_and_others_are_not() -> None:
    async def main() -> None:
        fleet = Fleet(4, max_failovers=1, quarantine_time=SECONDS)
        await fleet.start()
        generation, _ = fleet.submit(POISON, max_tokens=60)
        assert await kill_engines_with(fleet, generation) == 2
        with pytest.raises(GenerationError, match="under this very prompt") as refusal:
            fleet.submit(POISON, max_tokens=5, seed=99)
        assert refusal.value.status == 400
        fleet.submit(HARMLESS, max_tokens=5)
        await fleet.pass_time(SECONDS)
        fleet.submit(POISON, max_tokens=5)
        await fleet.run_to_the_end()

    run(main)


def test_every_engine_learns_of_it_and_those_that_come_later_too() -> None:
    async def main() -> None:
        fleet = Fleet(3, max_failovers=1, quarantine_time=SECONDS)
        await fleet.start()
        generation, _ = fleet.submit(POISON, max_tokens=60)
        await kill_engines_with(fleet, generation)
        await fleet.settle()
        for engine in fleet.transport.engines.values():
            assert set(engine.quarantined) == {FINGERPRINT}
            assert SECONDS - 10 < engine.quarantined[FINGERPRINT] <= SECONDS
        await crash(fleet, fleet.addresses[2])
        await fleet.pass_time(2)
        assert set(fleet.transport.engines[fleet.addresses[2]].quarantined) == {FINGERPRINT}

    run(main)


def test_a_verdict_is_withdrawn_where_the_engine_turns_out_to_live() -> None:
    async def main() -> None:
        fleet = Fleet(2, max_failovers=1, quarantine_time=SECONDS)
        await fleet.start()
        generation, _ = fleet.submit(POISON, max_tokens=60)
        await crash(fleet, fleet.engine_with(generation))
        suspect_at = fleet.engine_with(generation)
        # Not the engine dies, but the connection to it.
        fleet.transport.cut(suspect_at)
        await fleet.settle()
        await fleet.pass_time(2)
        assert generation.request_id not in fleet.pool._dispatcher.requests
        assert not fleet.pool._dispatcher.quarantine
        assert all(engine.quarantined.get(FINGERPRINT, 0) == 0 for engine in fleet.transport.engines.values())
        fleet.submit(POISON, max_tokens=5)

    run(main)


@pytest.mark.parametrize("settings", [{"max_failovers": 0}, {"max_failovers": 1, "quarantine_time": 0.0}])
def test_without_a_trial_or_where_it_is_off_nothing_is_refused(settings: dict[str, float]) -> None:
    async def main() -> None:
        fleet = Fleet(3, **settings)
        await fleet.start()
        generation, _ = fleet.submit(POISON, max_tokens=60)
        await kill_engines_with(fleet, generation)
        fleet.submit(POISON, max_tokens=5)

    run(main)


def test_what_this_process_slept_through_is_held_against_nobody() -> None:
    async def main() -> None:
        fleet = Fleet(2)
        await fleet.start()
        generation, sink = fleet.submit(POISON, max_tokens=20)
        await fleet.step()
        request = fleet.pool._dispatcher.requests[generation.request_id]
        # As after SIGSTOP: the engines have closed their connections meanwhile.
        fleet.now += 60
        for address in fleet.addresses:
            fleet.transport.cut(address)
        await fleet.settle()
        await fleet.pass_time(2)
        assert request.losses == 0
        await fleet.run_to_the_end()
        assert not sink.errors

    run(main)
