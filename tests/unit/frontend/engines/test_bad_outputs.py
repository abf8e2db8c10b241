"""What an engine says wrongly, and sinks that fail: one request's trouble at most."""

import pytest
from engine_fleet import Fleet, RecordingSink, long_prompt, run

from services.frontend.engines.connection_state import ConnectionState
from services.frontend.engines.in_process_engine import undisturbed_run
from services.frontend.generation import Generation
from shared.protocol import FinishReason, Outputs, RequestOutput
from shared.sampling_params import SamplingParams


def test_malformed_bytes_are_counted_and_cost_nobody_a_token(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        fleet = Fleet(2)
        await fleet.start()
        prompt = long_prompt(9)
        generation, sink = fleet.submit(prompt, max_tokens=9)
        _, other = fleet.submit(prompt, max_tokens=9)
        await fleet.step()
        address = fleet.engine_with(generation)
        engine = fleet.transport.engines[address]
        for data in (b"", b"\xc1", b"\x93\x05", b"\x00" * 100, b"\x92\x63\x01", b"\xdd\xff\xff\xff\xff"):
            engine.send(fleet.pool.boot_id, data)
            await fleet.settle()
        connection = fleet.pool.connections[address]
        assert fleet.pool.counts.link.malformed >= 1
        assert caplog.text.count("sent a malformed message") == 1
        await fleet.run_to_the_end()
        assert sink.token_ids == other.token_ids == undisturbed_run(prompt, 9)
        await fleet.pass_time(1)
        assert connection.state is ConnectionState.READY
        fleet.assert_clean()

    run(main)


def test_a_token_id_that_fits_nowhere_fails_that_request_alone() -> None:
    async def main() -> None:
        fleet = Fleet(1)
        await fleet.start()
        prompt = long_prompt(9)
        generation, sink = fleet.submit(prompt, max_tokens=9)
        _, other = fleet.submit(prompt, max_tokens=9)
        await fleet.settle()
        engine = fleet.transport.engines[fleet.addresses[0]]
        engine.post(fleet.pool.boot_id, Outputs([RequestOutput(generation.request_id, [2**40])], engine.load))
        await fleet.run_to_the_end()
        assert [error.status for error in sink.errors] == [500]
        assert other.token_ids == undisturbed_run(prompt, 9)
        fleet.assert_clean()

    run(main)


def test_a_sink_that_raises_ends_its_own_request_alone() -> None:
    class BrokenSink(RecordingSink):
        def accept(self, output: RequestOutput) -> bool:
            raise ValueError("a decode error")

        def fail(self, error: object) -> None:
            super().fail(error)  # type: ignore[arg-type]
            raise ValueError("and again")

    async def main() -> None:
        fleet = Fleet(1)
        await fleet.start()
        prompt = long_prompt(4)
        broken = BrokenSink()
        fleet.pool.submit(Generation("model", prompt, SamplingParams(max_tokens=4), broken))
        _, other = fleet.submit(prompt, max_tokens=4)
        await fleet.run_to_the_end()
        assert [error.status for error in broken.errors] == [500]
        assert other.token_ids == undisturbed_run(prompt, 4)
        fleet.assert_clean()

    run(main)


def test_an_engine_s_error_reaches_the_sink_as_it_is_and_is_not_tried_elsewhere() -> None:
    async def main() -> None:
        fleet = Fleet(2)
        await fleet.start()
        generation, sink = fleet.submit(long_prompt(4), max_tokens=4)
        await fleet.settle()
        engine = fleet.transport.engines[fleet.engine_with(generation)]
        engine.peers[fleet.pool.boot_id].requests.clear()
        error = RequestOutput(generation.request_id, finish_reason=FinishReason.ERROR, error="NaN in the logits")
        engine.post(fleet.pool.boot_id, Outputs([error], engine.load))
        await fleet.settle()
        assert [output.error for output in sink.outputs] == ["NaN in the logits"]
        assert sink.finish_reasons == [FinishReason.ERROR]
        fleet.assert_clean()

    run(main)
