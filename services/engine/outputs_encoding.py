"""A step's outputs for one frontend as bytes: one message, or several where one would be over the link's limit."""

from shared.protocol import MAX_MESSAGE_BYTES, FinishReason, Outputs, RequestOutput, encode


def encode_outputs(outputs: Outputs, max_bytes: int = MAX_MESSAGE_BYTES) -> tuple[list[bytes], list[int]]:
    """The messages to send, and the ids of requests whose output alone is too large (the logprobs of a very long
    prompt): those end with an error, and the caller aborts them."""
    data = encode(outputs)
    if len(data) <= max_bytes:
        return [data], []
    messages = [encode(Outputs([], outputs.load, outputs.stored_block_hashes, outputs.evicted_block_hashes))]
    too_large: list[int] = []
    for output in outputs.outputs:
        data = encode(Outputs([output], outputs.load))
        if len(data) > max_bytes:
            too_large.append(output.request_id)
            error = f"the output has {len(data)} bytes, over the link's limit of {max_bytes}: ask for fewer logprobs"
            failed = RequestOutput(output.request_id, finish_reason=FinishReason.ERROR, error=error)
            data = encode(Outputs([failed], outputs.load))
        messages.append(data)
    return messages, too_large
