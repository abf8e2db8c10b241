"""From a checked request to its answer: makes its generations, runs them, and writes what they make."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from services.frontend.generation import Generation
from services.frontend.http.answer import Chunks
from services.frontend.http.choices import Choices
from services.frontend.http.disconnect import while_connected
from services.frontend.http.errors import bad_request
from services.frontend.http.generation_trace import GenerationRecord
from services.frontend.http.json_bytes import json_bytes
from services.frontend.http.loaded_model import LoadedModel
from services.frontend.http.sampling import choice_seed, output_options
from services.frontend.http.schemas.chat import ChatCompletionRequest
from services.frontend.http.schemas.completion import CompletionRequest
from services.frontend.http.sse import EventStream
from services.frontend.http.state import FrontendState
from services.frontend.http.usage import Usage
from services.frontend.http.whole_collector import WholeCollector
from services.frontend.output.collector import Collector, Delta
from services.frontend.output.processor import OutputProcessor
from services.frontend.output.tools import ToolParser
from services.frontend.tracing import current_trace
from shared.sampling_params import SamplingParams


def make_choices(
    request: ChatCompletionRequest | CompletionRequest,
    model: LoadedModel,
    prompts: Sequence[tuple[list[int], SamplingParams]],
    new_reasoning_parser: Callable[[list[int]], Any] | None = None,
    *,
    new_tool_parser: Callable[[], ToolParser] | None = None,
    longest_timeout: float | None = None,
) -> Choices:
    """One generation for each prompt and each of its `n` choices: choice i belongs to prompt i // n.

    `longest_timeout`, in seconds, is the server's: a request may ask for less only."""
    n = request.n or 1
    num_choices = len(prompts) * n
    collector = Collector(num_choices) if request.stream else WholeCollector(num_choices)
    options = output_options(request)
    generations: list[Generation] = []
    trace = current_trace()
    record = GenerationRecord(trace, request, model.names[0], prompts[0][1]) if trace.recording else None
    # A prompt has the same logprobs for each of its choices. Where they are echoed, each writes them on its own.
    scored_once = not request.echo or isinstance(request, ChatCompletionRequest)
    for token_ids, sampling in prompts:
        for choice in range(n):
            if choice and scored_once:
                sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
            parser = new_reasoning_parser(token_ids) if new_reasoning_parser else None
            sink = OutputProcessor(
                model.tokenizer,
                options,
                collector,
                len(generations),
                parser,
                prompt_token_ids=token_ids,
                tools=new_tool_parser() if new_tool_parser else None,
            )
            generations.append(
                Generation(
                    model=model.names[0],
                    prompt_token_ids=token_ids,
                    sampling=msgspec.structs.replace(sampling, seed=choice_seed(sampling.seed, choice)),
                    sink=sink if record is None else record.sink(sink),
                    priority=request.priority or 0,
                    cache_salt=request.cache_salt or "",
                    trace=trace.generation(len(generations)),
                )
            )
    timeouts = [seconds for seconds in (request.timeout, longest_timeout) if seconds is not None]
    return Choices(model.engines, generations, collector, min(timeouts, default=None), record)


def check_number_of_choices(num_prompts: int, n: int, limit: int) -> None:
    """Raise ApiError 400 where one request has more choices than this server takes in one."""
    if num_prompts * n > limit:
        raise bad_request(
            f"{num_prompts} prompts with n {n} are {num_prompts * n} choices, but this server takes {limit} in one "
            "request: send fewer prompts in each",
            "prompt",
        )


async def answer(
    http_request: Request,
    state: FrontendState,
    model: LoadedModel,
    choices: Choices,
    *,
    chunks: Callable[[], Chunks] | None,
    whole: Callable[[dict[int, Delta]], dict[str, Any]],
    usage: Usage,
) -> Response:
    """Run the choices: as a stream where `chunks` is given, else whole. Raises GenerationError, ClientDisconnected."""
    record = choices.record
    if record is not None:
        record.usage = usage
        whole = record.whole(whole)
    if chunks is not None:
        return EventStream(state, choices, chunks() if record is None else record.chunks(chunks()))
    try:
        await state.begin(choices)
        deltas = await while_connected(http_request.receive, choices.next())
    finally:
        state.end(choices)
    if choices.error is not None:
        raise choices.error
    body = await model.prompts.run(_size(deltas), lambda: json_bytes(whole(dict(deltas))))
    return Response(body, media_type="application/json")


def _size(deltas: Sequence[tuple[int, Delta]]) -> int:
    """How much there is to write, as if it were text: a logprob takes as long as a few dozen characters."""
    return sum(
        len(delta.content) // 64
        + sum(
            32 + 32 * len(entry.top_token_ids)
            for entries in (delta.logprobs, delta.prompt_logprobs)
            for entry in entries or ()
        )
        for _, delta in deltas
    )
