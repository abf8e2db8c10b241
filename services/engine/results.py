"""What a step's result means for one request: its next token, and whether it ends with that. `core` asks for each."""

from services.engine.request import Request, SampledToken
from shared.protocol import FinishReason, RequestOutput


class RequestFailed(Exception):
    """This request cannot go on. The message is for the client."""


def next_output(request: Request, result: SampledToken, eos_ids: frozenset[int]) -> RequestOutput:
    """The output of a request whose tokens have all been computed; its `finish_reason` is set where it ends here.

    Gives the new token to the request and to its grammar. Raises RequestFailed.
    """
    output = RequestOutput(request.key.request_id)
    token_ids = request.token_ids
    if len(token_ids) >= request.max_total_tokens:
        output.finish_reason = FinishReason.LENGTH  # only scored
        return output
    token_id = result.token_id
    if token_id is None:
        raise RequestFailed("the model's executor sampled no token")
    token_ids.append(token_id)
    output.token_ids = [token_id]
    if result.logprobs is not None:
        output.logprobs = [result.logprobs]
    grammar = request.grammar
    if token_id in request.stop_ids and request.num_output_tokens > request.sampling.min_tokens:
        output.finish_reason = FinishReason.STOP
        output.stop_token_id = token_id
        return output
    if grammar is not None:
        grammar.accept(token_id)
        if grammar.error is not None:
            raise RequestFailed(grammar.error)
        if grammar.done:  # nothing can follow, whatever min_tokens and ignore_eos say
            output.finish_reason = FinishReason.STOP
            output.stop_token_id = token_id if token_id in eos_ids else None
            return output
    if len(token_ids) >= request.max_total_tokens:
        output.finish_reason = FinishReason.LENGTH
    return output


def add_what_comes_once(request: Request, output: RequestOutput) -> None:
    """Complete a request's first output. Raises RequestFailed."""
    output.cached_tokens = request.num_cached_tokens or 0
    if request.prompt_logprobs is not None:
        output.prompt_logprobs, request.prompt_logprobs = request.prompt_logprobs, None
        expected = request.num_prompt_tokens - 1
        if len(output.prompt_logprobs) != expected:
            raise RequestFailed(
                f"the model's executor gave {len(output.prompt_logprobs)} prompt logprobs, not {expected}"
            )
