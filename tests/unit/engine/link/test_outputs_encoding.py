"""A step's outputs go out whole, in as few messages as the link's limits allow."""

from hypothesis import given
from hypothesis import strategies as st

from services.engine.outputs_encoding import encode_outputs
from shared.protocol import FinishReason, Load, Outputs, RequestOutput, decode_to_frontend

LIMIT = 300


@given(st.lists(st.integers(0, 120), max_size=40), st.integers(1, 9))
def test_every_output_comes_once_and_in_order_and_no_message_is_over_a_limit(
    lengths: list[int], max_requests: int
) -> None:
    load = Load(free_blocks=5)
    asked = [RequestOutput(request_id, [7] * length * 3) for request_id, length in enumerate(lengths)]
    messages, too_large = encode_outputs(Outputs(asked, load, [1], [2]), LIMIT, max_requests)
    decoded = [decode_to_frontend(data) for data in messages]
    got: list[RequestOutput] = []
    for data, message in zip(messages, decoded, strict=True):
        assert isinstance(message, Outputs)
        assert len(data) <= LIMIT
        assert len(message.outputs) <= max_requests
        assert message.load == load
        got += message.outputs
    assert [m.stored_block_hashes for m in decoded if isinstance(m, Outputs) and m.stored_block_hashes] == [[1]]
    assert [output.request_id for output in got] == list(range(len(asked)))
    for output, wanted in zip(got, asked, strict=True):
        if output.request_id in too_large:
            assert output.finish_reason is FinishReason.ERROR
        else:
            assert output == wanted
    assert not [i for i in too_large if lengths[i] < 80]


def test_small_outputs_share_a_message_even_when_one_step_has_too_many() -> None:
    asked = [RequestOutput(request_id, [7]) for request_id in range(1000)]
    messages, too_large = encode_outputs(Outputs(asked, Load()), max_requests=300)
    assert len(messages) == 1 + 4
    assert not too_large
