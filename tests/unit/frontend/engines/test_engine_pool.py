"""Which engines are used: readiness, checks, weights, discovery, limits, and the end."""

import asyncio

import pytest
from engine_fleet import Fleet, run

from services.frontend.engines.connection_state import ConnectionState
from services.frontend.engines.in_process_engine import InProcessEngine, undisturbed_run
from services.frontend.engines.pool import EnginePool
from services.frontend.generation import GenerationError
from services.frontend.settings import EnginePoolSettings, FrontendSettings
from shared.protocol import FinishReason, Goodbye


def test_a_request_gets_its_tokens_and_leaves_nothing_behind() -> None:
    async def main() -> None:
        fleet = Fleet(2)
        await fleet.start()
        assert fleet.pool.ready
        assert fleet.pool.limits is not None
        assert fleet.pool.limits.vocab_size == 50
        _, sink = fleet.submit([5, 6, 7], max_tokens=6)
        await fleet.run_to_the_end()
        assert sink.token_ids == undisturbed_run([5, 6, 7], 6)
        assert sink.ends == 1
        fleet.assert_clean()

    run(main)


def test_start_waits_for_no_engine_and_submit_says_503_until_one_is_ready() -> None:
    async def main() -> None:
        fleet = Fleet(1)
        engine = fleet.transport.engines[fleet.addresses[0]]
        fleet.transport.kill(fleet.addresses[0])
        await fleet.pool.start()
        await fleet.settle()
        assert not fleet.pool.ready
        assert fleet.pool.limits is None
        with pytest.raises(GenerationError, match="no engine for model 'model'") as error:
            fleet.submit()
        assert (error.value.status, error.value.retry_after) == (503, 5.0)
        fleet.transport.run(fleet.addresses[0], engine)
        await fleet.settle()
        assert fleet.pool.ready
        await fleet.pool.stop()
        assert not fleet.pool.ready

    run(main)


def test_an_engine_that_does_not_answer_hello_is_asked_again() -> None:
    async def main() -> None:
        fleet = Fleet(1)
        engine = fleet.transport.engines[fleet.addresses[0]]
        engine.answers_hello = False
        await fleet.start()
        await fleet.pass_time(8)
        assert not fleet.pool.ready
        engine.answers_hello = True
        await fleet.pass_time(1)
        assert fleet.pool.ready

    run(main)


def test_an_engine_that_the_check_refuses_is_left_out_with_the_reason_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        fleet = Fleet(2, check=lambda welcome: "its vocabulary is another" if welcome.limits.vocab_size == 9 else None)
        fleet.transport.run(fleet.addresses[0], InProcessEngine(vocab_size=9))
        await fleet.start()
        refused, used = (fleet.pool.connections[address] for address in fleet.addresses)
        assert refused.state is ConnectionState.REFUSED
        assert used.state is ConnectionState.READY
        assert f"engine {fleet.addresses[0]} is left out: its vocabulary is another" in caplog.text
        for _ in range(4):
            assert fleet.engine_with(fleet.submit()[0]) == fleet.addresses[1]
        # Another process in its place is looked at anew.
        fleet.transport.kill(fleet.addresses[0])
        fleet.transport.run(fleet.addresses[0], InProcessEngine())
        await fleet.settle()
        assert refused.state is ConnectionState.READY

    run(main)


def test_a_check_that_raises_leaves_only_that_engine_out() -> None:
    async def main() -> None:
        def check(welcome: object) -> str | None:
            raise RuntimeError("no tokenizer")

        fleet = Fleet(1, check=check)
        await fleet.start()
        assert fleet.pool.connections[fleet.addresses[0]].state is ConnectionState.REFUSED

    run(main)


def test_an_engine_that_turns_this_frontend_away_is_asked_on_and_said_so_once(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        fleet = Fleet(1)
        engine = fleet.transport.engines[fleet.addresses[0]]
        engine.answers_hello = False
        await fleet.start()
        for _ in range(3):
            engine.post(fleet.pool.boot_id, Goodbye("4096 frontends are connected already"))
            await fleet.pass_time(1)
        assert caplog.text.count("turns this frontend away (it is asked again): 4096 frontends") == 1
        engine.answers_hello = True
        await fleet.pass_time(1.5)
        assert fleet.pool.ready

    run(main)


@pytest.mark.parametrize(("version", "usable"), [(0, True), (1, True), (2, True), (3, False)])
def test_neighbouring_protocol_versions_talk_and_others_do_not(version: int, usable: bool) -> None:
    async def main() -> None:
        fleet = Fleet(1)
        fleet.transport.engines[fleet.addresses[0]].protocol_version = version
        await fleet.start()
        assert fleet.pool.ready is usable

    run(main)


def test_other_weights_are_left_out_until_no_engine_serves_the_first_ones(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        fleet = Fleet(2)
        await fleet.start()
        first, second = fleet.addresses
        fleet.transport.kill(second)
        fleet.transport.run(second, InProcessEngine(fingerprint="other"))
        await fleet.settle()
        assert fleet.pool.connections[second].state is ConnectionState.REFUSED
        assert "it serves other weights (other) than engine" in caplog.text
        # The old one drains: new requests may go to the new weights, its own streams stay.
        generation, sink = fleet.submit(max_tokens=3)
        await fleet.step()
        fleet.transport.engines[first].drain()
        await fleet.settle()
        assert fleet.pool.connections[second].state is ConnectionState.READY
        assert fleet.engine_with(fleet.submit()[0]) == second
        assert fleet.engine_with(generation) == first
        # What the old one cannot finish must not go on with other weights.
        fleet.transport.engines[first].hand_over()
        await fleet.settle()
        assert [error.status for error in sink.errors] == [503]
        assert "replaced" in sink.errors[0].message

    run(main)


def test_limits_are_the_shortest_of_the_ready_engines() -> None:
    async def main() -> None:
        fleet = Fleet(1)
        fleet.addresses.append("10.0.0.9:5555")
        fleet.transport.run("10.0.0.9:5555", InProcessEngine(max_model_len=100))
        await fleet.start()
        assert fleet.pool.limits is not None
        assert fleet.pool.limits.max_model_len == 100
        fleet.transport.kill("10.0.0.9:5555")
        await fleet.settle()
        assert fleet.pool.limits.max_model_len == 4096

    run(main)


def test_an_engine_whose_limits_make_no_sense_is_left_out() -> None:
    async def main() -> None:
        fleet = Fleet(1)
        fleet.addresses.append("10.0.0.9:5555")
        fleet.transport.run("10.0.0.9:5555", InProcessEngine(max_model_len=-5))
        await fleet.start()
        assert fleet.pool.connections["10.0.0.9:5555"].state is ConnectionState.REFUSED
        assert fleet.pool.limits is not None
        assert fleet.pool.limits.max_model_len == 4096

    run(main)


def test_an_address_that_is_gone_drains_and_one_that_is_new_is_used() -> None:
    async def main() -> None:
        fleet = Fleet(2)
        first, second = fleet.addresses
        fleet.transport.kill(second)
        await fleet.start()
        generation, sink = fleet.submit([1, 2], max_tokens=4)
        await fleet.step()
        fleet.transport.run(second, InProcessEngine())
        fleet.pool.engines_found({second})
        await fleet.settle()
        assert fleet.engine_with(generation) == first
        for _ in range(3):
            assert fleet.engine_with(fleet.submit()[0]) == second
        await fleet.pass_time(2)
        assert first in fleet.pool.connections
        await fleet.run_to_the_end()
        await fleet.pass_time(1)
        assert first not in fleet.pool.connections
        assert sink.token_ids == undisturbed_run([1, 2], 4)
        # The engine was told, and holds nothing for this frontend any more.
        assert fleet.transport.engines[first].peers == {}
        fleet.assert_clean()

    run(main)


def test_a_stale_address_disturbs_nobody() -> None:
    async def main() -> None:
        fleet = Fleet(2)
        fleet.addresses.append("10.9.9.9:5555")
        await fleet.start()
        for _ in range(6):
            fleet.submit()
        await fleet.run_to_the_end()
        assert all(sink.finish_reasons for sink in fleet.sinks)
        fleet.assert_clean()

    run(main)


def test_two_addresses_of_one_engine_are_one_connection() -> None:
    async def main() -> None:
        fleet = Fleet(1)
        address = fleet.addresses[0]
        other = "[fd00::1]:5555"
        await fleet.start()
        engine = fleet.transport.engines[address]
        generation, sink = fleet.submit([4, 4], max_tokens=5)
        await fleet.step()
        # The same process behind a second address.
        fleet.transport.engines[other] = engine
        fleet.pool.engines_found({address, other})
        await fleet.settle()
        assert list(fleet.pool.connections) == [address]
        await fleet.pass_time(3)
        assert list(fleet.pool.connections) == [address]
        assert fleet.engine_with(generation) == address
        await fleet.run_to_the_end()
        assert sink.token_ids == undisturbed_run([4, 4], 5)
        # The first address is cut off for good: the other one serves.
        del fleet.transport.engines[address]
        fleet.transport.run(other, engine)
        for link in fleet.transport.links:
            link.disconnect("unplugged")
        await fleet.pass_time(8)
        assert fleet.pool.ready
        assert fleet.pool.connections[other].state is ConnectionState.READY

    run(main)


def test_a_link_that_cannot_be_opened_is_tried_again_and_disturbs_nobody() -> None:
    async def main() -> None:
        fleet = Fleet(2)
        opens = fleet.transport.open
        broken = [fleet.addresses[0]]

        def open_or_fail(address: str, identity: bytes, listener: object) -> object:
            if address in broken:
                raise OSError("too many open files")
            return opens(address, identity, listener)  # type: ignore[arg-type]

        fleet.transport.open = open_or_fail  # type: ignore[assignment, method-assign]
        await fleet.start()
        assert list(fleet.pool.connections) == [fleet.addresses[1]]
        broken.clear()
        await fleet.pass_time(0.5)
        assert len(fleet.pool.connections) == 2

    run(main)


def test_requests_beyond_the_limit_are_refused_with_429() -> None:
    async def main() -> None:
        fleet = Fleet(1, max_concurrent_requests=2)
        await fleet.start()
        fleet.submit()
        fleet.submit()
        with pytest.raises(GenerationError) as error:
            fleet.submit()
        assert (error.value.status, error.value.retry_after) == (429, 1.0)
        fleet.sinks.pop()
        await fleet.run_to_the_end()
        fleet.submit()
        await fleet.run_to_the_end()
        fleet.assert_clean()

    run(main)


def test_stop_fails_what_is_left_and_the_engines_forget_this_frontend() -> None:
    async def main() -> None:
        fleet = Fleet(2)
        await fleet.pool.start()
        await fleet.settle()
        fleet.submit()
        _, sink = fleet.submit()
        await fleet.step()
        await fleet.pool.stop()
        await fleet.settle()
        assert [error.status for error in sink.errors] == [503]
        for engine in fleet.transport.engines.values():
            assert engine.peers == {}
            assert engine.violations == []
        with pytest.raises(GenerationError, match="shutting down"):
            fleet.submit()

    run(main)


def test_the_watch_is_started_again_when_it_fails(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.frontend.engines.pool._RESTART_DELAY", 0.001)

    async def main() -> None:
        fleet = Fleet(1)
        ticks = 0
        twice = asyncio.Event()

        def tick() -> None:
            nonlocal ticks
            ticks += 1
            if ticks == 2:
                twice.set()
            raise RuntimeError("a bug")

        fleet.pool.tick = tick  # type: ignore[method-assign]
        await fleet.pool.start()
        await asyncio.wait_for(twice.wait(), 5)
        await fleet.pool.stop()
        assert "the watch over engines of model model failed" in caplog.text

    run(main)


def test_a_finished_request_reports_its_reason_as_the_engine_gave_it() -> None:
    async def main() -> None:
        fleet = Fleet(1)
        await fleet.start()
        prompt = next(
            [seed]
            for seed in range(1000)
            if undisturbed_run([seed], 5)[-1] == 0 and len(undisturbed_run([seed], 5)) > 1
        )
        _, sink = fleet.submit(prompt, max_tokens=5)
        await fleet.run_to_the_end()
        assert sink.finish_reasons == [FinishReason.STOP]
        assert sink.outputs[-1].stop_token_id == 0

    run(main)


def test_a_wrong_address_is_refused_with_the_right_form() -> None:
    pool = EnginePoolSettings(engine_addresses=["engine"])
    with pytest.raises(ValueError, match="'engine' must be host:port"):
        EnginePool("model", FrontendSettings(), pool, lambda welcome: None)


def test_what_the_pool_says_of_its_engines_to_people() -> None:
    async def main() -> None:
        fleet = Fleet(3)
        await fleet.start()
        ready, draining, lost = fleet.addresses
        _, sink = fleet.submit([5, 6, 7], max_tokens=6)
        fleet.transport.engines[draining].drain()
        fleet.transport.kill(lost)
        await fleet.settle()
        statuses = {status.address: status for status in fleet.pool.statuses()}
        assert list(statuses) == sorted(fleet.addresses)
        assert {address: status.state for address, status in statuses.items()} == {
            ready: "ready",
            draining: "draining",
            lost: "connecting",
        }
        assert sum(status.in_flight for status in statuses.values()) == 1
        for address in (ready, draining):
            fleet.transport.engines[address].heartbeat()
        await fleet.settle()
        assert sum(status.running_requests for status in fleet.pool.statuses()) == 1
        assert statuses[ready].boot_id == fleet.transport.engines[ready].boot_id.hex()
        await fleet.run_to_the_end()
        assert sink.ends == 1
        fleet.pool.connections[ready].retired = True
        assert fleet.pool.statuses()[sorted(fleet.addresses).index(ready)].state == "leaving"

    run(main)
