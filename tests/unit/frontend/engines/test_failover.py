"""A stream survives its engine: whatever becomes of the engines, the sink gets an undisturbed run's tokens, once."""

import math

from engine_fleet import Fleet, long_prompt, run

from services.frontend.engines.connection_state import ConnectionState
from services.frontend.engines.in_process_engine import undisturbed_run
from shared.protocol import FinishReason, Heartbeat, Outputs, RequestOutput, unpack_token_ids


def test_a_killed_engine_s_streams_go_on_elsewhere_from_where_they_were() -> None:
    async def main() -> None:
        fleet = Fleet(2)
        await fleet.start()
        prompt = long_prompt(10)
        generation, sink = fleet.submit(prompt, max_tokens=10, logprobs=0, prompt_logprobs=0)
        for _ in range(4):
            await fleet.step()
        first = fleet.engine_with(generation)
        fleet.transport.kill(first)
        await fleet.settle()
        second = fleet.engine_with(generation)
        assert second != first
        resumed = fleet.transport.engines[second].added[-1]
        assert resumed.request_id != generation.request_id
        assert unpack_token_ids(resumed.output_token_ids) == sink.token_ids
        assert resumed.sampling.prompt_logprobs is None
        await fleet.run_to_the_end()
        assert sink.token_ids == undisturbed_run(prompt, 10)
        assert [output.request_id for output in sink.outputs] == [generation.request_id] * 10
        # What comes once, came once, from the first engine; logprobs went on.
        assert [output.cached_tokens is not None for output in sink.outputs] == [True] + [False] * 9
        assert [output.prompt_logprobs is not None for output in sink.outputs] == [True] + [False] * 9
        assert all(output.logprobs for output in sink.outputs)
        assert fleet.pool.counts.failovers == 1
        fleet.assert_clean()

    run(main)


def test_an_engine_that_died_before_its_first_output_leaves_the_counts_to_the_next() -> None:
    async def main() -> None:
        fleet = Fleet(2)
        await fleet.start()
        generation, sink = fleet.submit(long_prompt(2), max_tokens=2, prompt_logprobs=0)
        await fleet.settle()
        fleet.transport.kill(fleet.engine_with(generation))
        await fleet.run_to_the_end()
        assert sink.outputs[0].cached_tokens is not None
        assert sink.outputs[0].prompt_logprobs is not None
        fleet.assert_clean()

    run(main)


def test_a_frozen_engine_is_lost_at_the_time_out_and_its_late_words_are_nobody_s() -> None:
    async def main() -> None:
        fleet = Fleet(2)
        await fleet.start()
        prompt = long_prompt(12)
        generation, sink = fleet.submit(prompt, max_tokens=12)
        await fleet.step()
        frozen = fleet.engine_with(generation)
        engine = fleet.transport.engines[frozen]
        fleet.transport.freeze(frozen)
        # One step was under way when it froze.
        engine.step()
        await fleet.pass_time(4.5)
        assert fleet.engine_with(generation) == frozen
        await fleet.pass_time(1)
        assert fleet.engine_with(generation) != frozen
        await fleet.step()
        fleet.transport.thaw(frozen)
        await fleet.pass_time(1)
        # Back, still with the request in its own books until it is told.
        assert fleet.pool.connections[frozen].state is ConnectionState.READY
        assert engine.num_requests == 0
        await fleet.run_to_the_end()
        assert sink.token_ids == undisturbed_run(prompt, 12)
        fleet.assert_clean()

    run(main)


def test_a_cut_connection_loses_what_was_under_way_and_the_living_engine_is_told_to_stop() -> None:
    async def main() -> None:
        fleet = Fleet(1)
        await fleet.start()
        prompt = long_prompt(6)
        _, sink = fleet.submit(prompt, max_tokens=6)
        await fleet.step()
        engine = fleet.transport.engines[fleet.addresses[0]]
        # A step whose message never arrives, of an engine that does not itself forget at HELLO.
        engine.drops_at_hello = False
        fleet.transport.cut(fleet.addresses[0])
        engine.step()
        await fleet.settle()
        assert fleet.pool.ready
        # The attempt from before the cut was aborted, the new one is the only one.
        assert engine.num_requests == 1
        await fleet.run_to_the_end()
        assert sink.token_ids == undisturbed_run(prompt, 6)
        fleet.assert_clean()

    run(main)


def test_outputs_of_an_earlier_attempt_on_the_same_engine_are_ignored() -> None:
    async def main() -> None:
        fleet = Fleet(1)
        await fleet.start()
        prompt = long_prompt(6)
        generation, sink = fleet.submit(prompt, max_tokens=6)
        await fleet.step()
        fleet.transport.cut(fleet.addresses[0])
        await fleet.settle()
        engine = fleet.transport.engines[fleet.addresses[0]]
        stale = RequestOutput(generation.request_id, [41], FinishReason.STOP)
        engine.post(fleet.pool.boot_id, Outputs([stale], engine.load))
        await fleet.settle()
        assert sink.ends == 0
        assert fleet.pool.connections[fleet.addresses[0]].stale_outputs == 1
        await fleet.run_to_the_end()
        assert sink.token_ids == undisturbed_run(prompt, 6)
        fleet.assert_clean()

    run(main)


def test_another_process_that_answers_without_a_disconnect_has_none_of_the_requests() -> None:
    async def main() -> None:
        fleet = Fleet(1)
        await fleet.start()
        prompt = long_prompt(6)
        _, sink = fleet.submit(prompt, max_tokens=6)
        await fleet.step()
        # Behind a proxy a new process may appear on a connection that never broke.
        engine = fleet.transport.engines[fleet.addresses[0]]
        engine.boot_id = b"another"
        for peer in engine.peers.values():
            peer.requests.clear()
        engine.post(fleet.pool.boot_id, engine._welcome())
        await fleet.settle()
        await fleet.run_to_the_end()
        assert sink.token_ids == undisturbed_run(prompt, 6)
        assert fleet.pool.counts.failovers == 1
        fleet.assert_clean()

    run(main)


def test_an_engine_that_forgot_this_frontend_is_greeted_again_and_its_requests_move() -> None:
    async def main() -> None:
        fleet = Fleet(1, max_failovers=0)
        await fleet.start()
        engine = fleet.transport.engines[fleet.addresses[0]]
        prompt = long_prompt(5)
        _, sink = fleet.submit(prompt, max_tokens=5)
        await fleet.step()
        engine.forget_frontends()
        # The engine hands back what it is sent, and so tells of it before any time-out.
        _, second = fleet.submit(prompt, max_tokens=5)
        await fleet.settle()
        await fleet.pass_time(1)
        assert fleet.pool.ready
        await fleet.run_to_the_end()
        assert sink.token_ids == second.token_ids == undisturbed_run(prompt, 5)
        fleet.assert_clean()

    run(main)


def test_an_engine_that_gives_everything_back_for_ever_does_not_keep_a_request_for_ever() -> None:
    async def main() -> None:
        fleet = Fleet(1, no_engine_timeout=10)
        await fleet.start()
        engine = fleet.transport.engines[fleet.addresses[0]]
        sinks = [fleet.submit(long_prompt(5), max_tokens=5)[1] for _ in range(3)]
        for _ in range(24):
            await fleet.settle()
            engine.hand_over()
            await fleet.pass_time(0.5)
        assert [[error.status for error in sink.errors] for sink in sinks] == [[503]] * 3
        assert len(engine.added) < 60
        fleet.assert_clean()

    run(main)


def test_an_engine_that_drops_everything_at_hello_is_not_greeted_while_it_has_requests() -> None:
    async def main() -> None:
        fleet = Fleet(1)
        await fleet.start()
        prompt = long_prompt(5)
        _, sink = fleet.submit(prompt, max_tokens=5)
        await fleet.step()
        # Gone from discovery, and named again.
        fleet.pool.engines_found(set())
        assert not fleet.pool.ready
        fleet.pool.engines_found(set(fleet.addresses))
        assert fleet.pool.ready
        await fleet.run_to_the_end()
        assert sink.token_ids == undisturbed_run(prompt, 5)
        assert len(fleet.transport.engines[fleet.addresses[0]].added) == 1
        fleet.assert_clean()

    run(main)


def test_tokens_that_come_with_a_handover_count() -> None:
    async def main() -> None:
        fleet = Fleet(2)
        await fleet.start()
        prompt = long_prompt(5)
        generation, sink = fleet.submit(prompt, max_tokens=5)
        await fleet.settle()
        engine = fleet.transport.engines[fleet.engine_with(generation)]
        expected = undisturbed_run(prompt, 5)
        last = RequestOutput(generation.request_id, expected[:2], FinishReason.HANDED_OVER)
        engine.peers[fleet.pool.boot_id].requests.clear()
        engine.post(fleet.pool.boot_id, Outputs([last], engine.load))
        await fleet.run_to_the_end()
        assert sink.token_ids == expected
        assert sink.finish_reasons == [FinishReason.LENGTH]
        fleet.assert_clean()

    run(main)


def test_a_request_whose_engines_keep_dying_is_given_up_and_no_other_is() -> None:
    async def main() -> None:
        fleet = Fleet(4, max_failovers=2)
        await fleet.start()
        poisoned, sink = fleet.submit(long_prompt(20), max_tokens=20)
        await fleet.step()
        for _ in range(3):
            fleet.transport.kill(fleet.engine_with(poisoned))
            await fleet.settle()
        assert [error.status for error in sink.errors] == [500]
        assert "3 engines died" in sink.errors[0].message
        # One engine is left, and serves.
        _, other = fleet.submit(long_prompt(3, start=500), max_tokens=3)
        await fleet.run_to_the_end()
        assert other.finish_reasons == [FinishReason.LENGTH]
        fleet.assert_clean()

    run(main)


def test_two_losses_are_survived() -> None:
    async def main() -> None:
        fleet = Fleet(3, max_failovers=2)
        await fleet.start()
        prompt = long_prompt(9)
        generation, sink = fleet.submit(prompt, max_tokens=9)
        for _ in range(2):
            await fleet.step()
            fleet.transport.kill(fleet.engine_with(generation))
            await fleet.settle()
        await fleet.run_to_the_end()
        assert sink.token_ids == undisturbed_run(prompt, 9)
        fleet.assert_clean()

    run(main)


def test_a_frontend_that_was_held_up_does_not_judge_its_engines_by_that() -> None:
    async def main() -> None:
        fleet = Fleet(1)
        await fleet.start()
        await fleet.pass_time(1)
        fleet.now += 30
        connection = fleet.pool.connections[fleet.addresses[0]]
        fleet.pool.tick()
        assert connection.lost_at == -math.inf
        # Silence after that is the engine's own.
        await fleet.pass_time(1, heartbeats=False)
        assert connection.lost_at > fleet.now - 1

    run(main)


def test_heartbeats_go_out_when_nothing_else_does_and_keep_an_idle_engine_ready() -> None:
    async def main() -> None:
        fleet = Fleet(1)
        await fleet.start()
        engine = fleet.transport.engines[fleet.addresses[0]]
        heard: list[bytes] = []
        receive = engine.receive
        engine.receive = lambda identity, data: (heard.append(data), receive(identity, data))[1]  # type: ignore[method-assign]
        await fleet.pass_time(20)
        assert fleet.pool.ready
        assert 10 <= len(heard) <= 20
        engine.post(fleet.pool.boot_id, Heartbeat())
        await fleet.settle()
        assert fleet.pool.ready

    run(main)
