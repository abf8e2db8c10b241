"""Whoever has enough of a request stops its engine, whatever the link does; one that takes no messages is left."""

from engine_fleet import Fleet, long_prompt, run

from services.frontend.engines.in_process_engine import undisturbed_run


def test_an_abort_stops_the_engine_whatever_state_the_request_is_in() -> None:
    async def main() -> None:
        fleet = Fleet(1)
        await fleet.start()
        engine = fleet.transport.engines[fleet.addresses[0]]
        for steps in range(3):
            generation, sink = fleet.submit(long_prompt(9), max_tokens=9)
            for _ in range(steps):
                await fleet.step()
            fleet.pool.abort(generation.request_id)
            # What is still under way when the abort leaves is ignored.
            engine.step()
            await fleet.settle()
            assert engine.num_requests == 0
            assert len(sink.token_ids) == steps
        fleet.pool.abort(123456)
        fleet.assert_clean()

    run(main)


def test_a_sink_that_has_enough_stops_the_engine() -> None:
    async def main() -> None:
        fleet = Fleet(1)
        await fleet.start()
        prompt = long_prompt(9)
        _, sink = fleet.submit(prompt, max_tokens=9, stop_after=4)
        await fleet.run_to_the_end()
        assert sink.token_ids == undisturbed_run(prompt, 4)
        assert fleet.transport.engines[fleet.addresses[0]].num_requests == 0
        fleet.assert_clean()

    run(main)


def test_an_abort_that_the_engine_does_not_take_now_is_repeated_until_it_does() -> None:
    async def main() -> None:
        fleet = Fleet(1)
        await fleet.start()
        engine = fleet.transport.engines[fleet.addresses[0]]
        generation, _ = fleet.submit(long_prompt(9), max_tokens=9)
        await fleet.step()
        (link,) = fleet.transport.links
        link.blocked = True
        fleet.pool.abort(generation.request_id)
        await fleet.pass_time(2)
        assert engine.num_requests == 1
        assert not fleet.pool.ready
        link.blocked = False
        await fleet.pass_time(1)
        assert engine.num_requests == 0
        assert fleet.pool.ready
        fleet.assert_clean()

    run(main)


def test_an_engine_that_takes_no_messages_is_avoided_and_lost_at_the_time_out() -> None:
    async def main() -> None:
        fleet = Fleet(2)
        await fleet.start()
        stuck = fleet.addresses[0]
        link = next(link for link in fleet.transport.links if link.address == stuck)
        prompt = long_prompt(9)
        generations = [fleet.submit(prompt, max_tokens=9) for _ in range(2)]
        await fleet.step()
        link.blocked = True
        assert {fleet.engine_with(fleet.submit()[0]) for _ in range(4)} == {fleet.addresses[1]}
        await fleet.pass_time(6)
        assert {fleet.engine_with(generation) for generation, _ in generations} == {fleet.addresses[1]}
        link.blocked = False
        await fleet.pass_time(1)
        await fleet.run_to_the_end()
        assert all(sink.token_ids == undisturbed_run(prompt, 9) for _, sink in generations)
        fleet.assert_clean()

    run(main)
