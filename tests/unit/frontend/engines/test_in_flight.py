"""What an engine may not do to a request, whatever it sends."""

from engine_fleet import RecordingSink

from services.frontend.engines.in_flight import InFlight
from services.frontend.generation import Generation
from shared.protocol import FinishReason, RequestOutput
from shared.sampling_params import SamplingParams


def request(max_tokens: int) -> tuple[InFlight, RecordingSink]:
    sink = RecordingSink()
    return InFlight(Generation("model", [1, 2], SamplingParams(max_tokens=max_tokens), sink)), sink


def test_more_tokens_than_were_asked_for_end_the_request() -> None:
    in_flight, sink = request(3)
    assert not in_flight.deliver(RequestOutput(1, [5, 6, 7]))
    assert in_flight.deliver(RequestOutput(1, [8]))
    assert sink.token_ids == [5, 6, 7]
    assert "more than the 3 tokens" in sink.errors[0].message


def test_as_many_as_were_asked_for_are_welcome() -> None:
    in_flight, sink = request(3)
    assert in_flight.deliver(RequestOutput(1, [5, 6, 7], FinishReason.LENGTH))
    assert sink.errors == []


def test_an_id_that_no_message_could_carry_back_ends_the_request() -> None:
    in_flight, sink = request(3)
    assert in_flight.deliver(RequestOutput(1, [2**40]))
    assert len(sink.errors) == 1
