"""POST /v1/completions."""

import asyncio

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from services.frontend.http.answer import AnswerHead
from services.frontend.http.completion_answer import CompletionAnswer, CompletionChunks, EchoedPrompt
from services.frontend.http.direct_route import DirectRoute
from services.frontend.http.errors import bad_request
from services.frontend.http.generate import answer, check_number_of_choices, make_choices
from services.frontend.http.loaded_model import LoadedModel
from services.frontend.http.logprobs import LogprobFormat
from services.frontend.http.openapi import documented
from services.frontend.http.parsing import parse_body
from services.frontend.http.sampling import bad_word_ids, check_counts, sampling_params
from services.frontend.http.schemas.completion import CompletionRequest
from services.frontend.http.schemas.responses import Completion
from services.frontend.http.state import frontend_state
from services.frontend.http.structured_output import asked_structured_output, check_grammar
from services.frontend.http.usage import Usage
from services.frontend.metrics.request_record import generates
from services.frontend.prompts.limits import check_prompt_ids, room_for_output, truncate_prompt
from shared.protocol import ModelLimits

router = APIRouter(route_class=DirectRoute)

_DEFAULT_MAX_TOKENS = 16  # OpenAI's


@router.post("/v1/completions", **documented(CompletionRequest, Completion, streams=True))
async def create_completion(http_request: Request) -> Response:
    """Continue one text or several, whole or as a stream of server-sent events."""
    state = frontend_state(http_request)
    request = await parse_body(http_request, CompletionRequest)
    name, model = state.model(request.model)
    check_counts(request, max_n=state.settings.max_n, max_stop=state.settings.max_stop)
    most = min(state.settings.max_choices, state.settings.max_concurrent_requests)
    check_number_of_choices(len(request.prompt), request.n or 1, most)
    limits = model.limits()
    max_tokens = model.defaults.limited(_DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens)
    if max_tokens == 0 and not request.echo and request.prompt_logprobs is None:
        raise bad_request("max_tokens must be at least 1, unless the prompt is scored (echo)", "max_tokens")
    asked_structure = asked_structured_output(request)
    with state.preparing():
        await state.arrivals.take_turn()
        structured = await check_grammar(state.grammars, *asked_structure) if asked_structure else None
        prompts = await _prompts(request, model, limits, max_tokens)
        bad_words = await model.prompts.run(request.num_bytes, lambda: bad_word_ids(request, model.tokenizer))
    sampling = sampling_params(
        request,
        max_tokens=max_tokens,
        bad_words=bad_words,
        vocab_size=limits.vocab_size,
        defaults=model.defaults,
        structured_output=structured,
    )
    choices = make_choices(
        request,
        model,
        [(prompt.token_ids, sampling) for prompt in prompts],
        longest_timeout=state.settings.request_timeout,
    )
    completion = _answer(request, name, model, prompts)
    generates(http_request.scope, "text_completion", name, choices, completion.usage)
    return await answer(
        http_request,
        state,
        model,
        choices,
        chunks=(lambda: CompletionChunks(completion)) if request.stream else None,
        whole=completion.whole,
        usage=completion.usage,
    )


async def _prompts(
    request: CompletionRequest, model: LoadedModel, limits: ModelLimits, max_tokens: int
) -> list[EchoedPrompt]:
    """Each prompt's token ids, checked against the model's limits, and its text where it is echoed."""
    texts = [prompt for prompt in request.prompt if isinstance(prompt, str)]
    # They are all of one kind.
    encoded = None
    if texts:
        encoded = await model.prompts.encode(
            texts,
            add_special_tokens=request.add_special_tokens,
            max_model_len=None if request.truncate_prompt_tokens is not None else limits.max_model_len,
        )
    prompts: list[EchoedPrompt] = []
    for number, prompt in enumerate(request.prompt):
        if number:
            # Thousands of ids each are looked at, and others have requests too.
            await asyncio.sleep(0)
        if isinstance(prompt, str):
            assert encoded is not None
            token_ids = encoded[number]
        else:
            token_ids = prompt
        kept = truncate_prompt(
            token_ids, request.truncate_prompt_tokens, max_model_len=limits.max_model_len, max_tokens=max_tokens
        )
        room_for_output(len(kept), max_tokens, max_model_len=limits.max_model_len, param="prompt")
        if not isinstance(prompt, str):
            check_prompt_ids(kept, limits.vocab_size, "prompt")
        if not request.echo:
            text = ""
        elif isinstance(prompt, str) and len(kept) == len(token_ids):
            text = prompt
        else:
            text = await model.prompts.decode(kept, skip_special_tokens=request.skip_special_tokens is not False)
        prompts.append(EchoedPrompt(kept, text))
    return prompts


def _answer(request: CompletionRequest, name: str, model: LoadedModel, prompts: list[EchoedPrompt]) -> CompletionAnswer:
    n = request.n or 1
    return CompletionAnswer(
        head=AnswerHead("cmpl", "text_completion", name),
        prompts=prompts,
        choices_per_prompt=n,
        usage=Usage([len(prompt.token_ids) for prompt in prompts], n, with_reasoning=False),
        tokenizer=model.tokenizer,
        logprobs=LogprobFormat(
            model.tokenizer, request.logprobs or 0, as_token_ids=bool(request.return_tokens_as_token_ids)
        ),
        prompt_logprobs=LogprobFormat(model.tokenizer, request.prompt_logprobs or 0),
        hidden_token_ids=model.tokenizer.special_token_ids if request.skip_special_tokens is not False else frozenset(),
        echo=bool(request.echo),
        wants_logprobs=request.logprobs is not None,
        wants_prompt_logprobs=request.prompt_logprobs is not None,
        wants_token_ids=bool(request.return_token_ids),
        include_usage=request.include_usage,
        continuous_usage=request.continuous_usage,
    )
