"""A poisoned request takes the engines down that have it: it is found, and those that shared its engines live."""

import pytest
from engine_fleet import Fleet, run

from services.frontend.engines.in_process_engine import InProcessEngine, undisturbed_run
from services.frontend.engines.trials import TOKENS_TO_ACQUIT
from shared.protocol import FinishReason

TOKENS = 60


def long_prompts(count: int) -> list[list[int]]:
    """Prompts whose runs meet no eos."""
    prompts = [[seed] for seed in range(1000)]
    return [prompt for prompt in prompts if len(undisturbed_run(prompt, TOKENS)) == TOKENS][:count]


async def crash(fleet: Fleet, address: str) -> None:
    """The engine's process dies, and its next one comes up."""
    fleet.transport.kill(address)
    await fleet.settle()
    fleet.transport.run(address, InProcessEngine())
    await fleet.pass_time(0.5)


@pytest.mark.parametrize("num_engines", [1, 2, 3])
@pytest.mark.parametrize("max_failovers", [1, 2])
@pytest.mark.parametrize("poisoned_at", [0, 5])
def test_the_poisoned_request_is_given_up_and_no_other(num_engines: int, max_failovers: int, poisoned_at: int) -> None:
    async def main() -> None:
        fleet = Fleet(num_engines, max_failovers=max_failovers)
        await fleet.start()
        *prompts, poison = long_prompts(13)
        others = [fleet.submit(prompt, max_tokens=TOKENS)[1] for prompt in prompts]
        poisoned, sink = fleet.submit(poison, max_tokens=TOKENS)
        deaths = 0
        for _ in range(2000):
            if not fleet.pool.num_requests:
                break
            request = fleet.pool._dispatcher.requests.get(poisoned.request_id)
            if request is not None and request.connection and len(request.output_token_ids) >= poisoned_at:
                deaths += 1
                await crash(fleet, request.connection.address)
            else:
                await fleet.step()
                await fleet.pass_time(0.5)
        assert deaths == max_failovers + 1
        assert [error.status for error in sink.errors] == [500]
        for other, prompt in zip(others, prompts, strict=True):
            assert other.errors == []
            assert other.token_ids == undisturbed_run(prompt, TOKENS)
        fleet.assert_clean()

    run(main)


def test_trials_are_one_at_a_time_on_each_engine_and_short() -> None:
    async def main() -> None:
        fleet = Fleet(1, max_failovers=1)
        await fleet.start()
        for prompt in long_prompts(5):
            fleet.submit(prompt, max_tokens=TOKENS)
        await fleet.step()
        await crash(fleet, fleet.addresses[0])
        (connection,) = fleet.pool.connections.values()
        assert len(connection.in_flight) == 1
        for _ in range(TOKENS_TO_ACQUIT):
            await fleet.step()
        # The one that was tried runs on beside the next.
        assert len(connection.in_flight) == 2
        # A client that leaves makes room for the next trial at once.
        *_, newest = connection.in_flight.values()
        fleet.pool.abort(newest.request_id)
        assert len(connection.in_flight) == 2
        # Waiting for a trial is not waiting for an engine: no time-out ends it.
        await fleet.pass_time(30)
        assert not any(sink.errors for sink in fleet.sinks)
        await fleet.run_to_the_end()
        assert sum(sink.finish_reasons == [FinishReason.LENGTH] for sink in fleet.sinks) == 4
        fleet.assert_clean()

    run(main)
