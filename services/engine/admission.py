"""Makes a request out of an ADD, after checking it again: the frontend did, but a wrong id would write into a
neighbour's row of the batch, and another frontend may be of another version."""

import math
from dataclasses import dataclass

from services.engine.request import Request, RequestKey
from shared.protocol import TOKEN_ID_BYTES, Add, FinishReason, MalformedMessage, ModelLimits, unpack_token_ids
from shared.sampling_params import InvalidSamplingParams, check_sampling_params


class InvalidRequest(ValueError):
    """This request cannot be carried out, here or elsewhere. The message is for the client."""


@dataclass(frozen=True, slots=True)
class Ended:
    """A resumed request that had ended already when it came."""

    reason: FinishReason
    stop_token_id: int | None = None


def make_request(peer: bytes, add: Add, limits: ModelLimits, eos_ids: frozenset[int]) -> Request:
    """The request that an ADD asks for. Raises InvalidRequest."""
    sampling = add.sampling
    _check_prompt_length(add, limits)
    try:
        prompt = unpack_token_ids(add.prompt_token_ids)
        output = unpack_token_ids(add.output_token_ids)
        check_sampling_params(sampling, limits.vocab_size)
    except (MalformedMessage, InvalidSamplingParams) as error:
        raise InvalidRequest(str(error)) from error
    if not prompt:
        raise InvalidRequest("the prompt is empty: it must hold at least one token")
    for name, token_ids in (("prompt", prompt), ("output so far", output)):
        if token_ids and (min(token_ids) < 0 or max(token_ids) >= limits.vocab_size):
            wrong = next(token_id for token_id in token_ids if not 0 <= token_id < limits.vocab_size)
            raise InvalidRequest(
                f"the {name} holds token id {wrong}, outside the vocabulary (0 to {limits.vocab_size - 1})"
            )
    if not math.isfinite(add.arrival_time):
        raise InvalidRequest(f"arrival_time must be a finite number, not {add.arrival_time}")
    if add.deadline is not None and math.isnan(add.deadline):
        raise InvalidRequest("deadline must be a number")
    stop_ids = frozenset() if sampling.ignore_eos else eos_ids
    if sampling.stop_token_ids:
        stop_ids = stop_ids.union(sampling.stop_token_ids)
    return Request(
        key=RequestKey(peer, add.request_id),
        token_ids=prompt + output,
        num_prompt_tokens=len(prompt),
        sampling=sampling,
        priority=add.priority,
        arrival_time=add.arrival_time,
        deadline=add.deadline,
        cache_salt=add.cache_salt,
        trace_context=add.trace_context,
        stop_ids=stop_ids,
        max_total_tokens=min(len(prompt) + sampling.max_tokens, limits.max_model_len),
        # With output there was a first output before, and it carried them.
        prompt_logprobs=[] if sampling.prompt_logprobs is not None and not output else None,
    )


def _check_prompt_length(add: Add, limits: ModelLimits) -> None:
    """Before anything is unpacked: millions of ids would keep the loop, and everybody's streams, waiting."""
    # A prompt that is only scored needs no room for an output.
    room = limits.max_model_len - min(1, add.sampling.max_tokens)
    num_tokens = len(add.prompt_token_ids) // TOKEN_ID_BYTES
    if num_tokens > room:
        raise InvalidRequest(
            f"the prompt has {num_tokens} tokens; at most {room} fit into the model's context of "
            f"{limits.max_model_len} tokens, output included"
        )


def already_ended(request: Request) -> Ended | None:
    """Whether the output that a resumed request came with ends it already."""
    if not request.num_output_tokens:
        return None
    last = request.token_ids[-1]
    if last in request.stop_ids and request.num_output_tokens > request.sampling.min_tokens:
        return Ended(FinishReason.STOP, last)
    if len(request.token_ids) >= request.max_total_tokens:
        return Ended(FinishReason.LENGTH)
    return None
