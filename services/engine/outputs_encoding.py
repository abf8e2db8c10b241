"""A step's outputs for one frontend as bytes: one message, or several where one would be over the link's limits."""

from shared.protocol import (
    MAX_MESSAGE_BYTES,
    MAX_REQUESTS_PER_MESSAGE,
    FinishReason,
    Load,
    Outputs,
    RequestOutput,
    encode,
)


def encode_outputs(
    outputs: Outputs, max_bytes: int = MAX_MESSAGE_BYTES, max_requests: int = MAX_REQUESTS_PER_MESSAGE
) -> tuple[list[bytes], list[int]]:
    """The messages to send, and the ids of requests whose output alone is too large (the logprobs of a very long
    prompt): those end with an error, and the caller aborts them."""
    if len(outputs.outputs) <= max_requests:
        data = encode(outputs)
        if len(data) <= max_bytes:
            return [data], []
    messages = [encode(Outputs([], outputs.load, outputs.stored_block_hashes, outputs.evicted_block_hashes))]
    too_large: list[int] = []
    _encode_in_parts(outputs.outputs, outputs.load, max_bytes, max_requests, messages, too_large)
    return messages, too_large


def _encode_in_parts(
    outputs: list[RequestOutput],
    load: Load,
    max_bytes: int,
    max_requests: int,
    messages: list[bytes],
    too_large: list[int],
) -> None:
    data = encode(Outputs(outputs, load)) if len(outputs) <= max_requests else b""
    if data and len(data) <= max_bytes:
        messages.append(data)
    elif len(outputs) > 1:
        middle = len(outputs) // 2
        for half in (outputs[:middle], outputs[middle:]):
            _encode_in_parts(half, load, max_bytes, max_requests, messages, too_large)
    else:
        (output,) = outputs
        too_large.append(output.request_id)
        error = f"the output has {len(data)} bytes, over the link's limit of {max_bytes}: ask for fewer logprobs"
        failed = RequestOutput(output.request_id, finish_reason=FinishReason.ERROR, error=error)
        messages.append(encode(Outputs([failed], load)))
