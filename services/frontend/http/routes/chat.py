"""POST /v1/chat/completions."""

from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from services.frontend.http.answer import AnswerHead
from services.frontend.http.chat_answer import ChatAnswer, ChatChunks
from services.frontend.http.direct_route import DirectRoute
from services.frontend.http.errors import bad_request
from services.frontend.http.generate import answer, make_choices
from services.frontend.http.loaded_model import LoadedModel
from services.frontend.http.logprobs import LogprobFormat
from services.frontend.http.openapi import documented
from services.frontend.http.parsing import parse_body
from services.frontend.http.sampling import bad_word_ids, check_counts, sampling_params
from services.frontend.http.schemas.chat import ChatCompletionRequest
from services.frontend.http.schemas.responses import ChatCompletion
from services.frontend.http.state import frontend_state
from services.frontend.http.structured_output import asked_structured_output, check_grammar
from services.frontend.http.tool_structure import tool_structure
from services.frontend.http.tool_use import tool_use
from services.frontend.http.usage import Usage
from services.frontend.metrics.request_record import generates
from services.frontend.prompts.limits import room_for_output, truncate_prompt
from shared.structured_output import StructuredOutput

router = APIRouter(route_class=DirectRoute)


@router.post("/v1/chat/completions", **documented(ChatCompletionRequest, ChatCompletion, streams=True))
async def create_chat_completion(http_request: Request) -> Response:
    """Answer a conversation, whole or as a stream of server-sent events."""
    state = frontend_state(http_request)
    request = await parse_body(http_request, ChatCompletionRequest)
    name, model = state.model(request.model)
    check_counts(request, max_n=min(state.settings.max_n, state.settings.max_choices), max_stop=state.settings.max_stop)
    limits = model.limits()
    variables = _template_variables(request)
    tools = tool_use(request, model)
    asked_structure = asked_structured_output(request)
    with state.preparing():
        await state.arrivals.take_turn()
        structured = await check_grammar(state.grammars, *asked_structure) if asked_structure else None
        if tools is not None:
            num_bytes = request.num_bytes
            structured = await tool_structure(tools, model, state.grammars, asked_structure, num_bytes=num_bytes)
        token_ids = await model.prompts.encode_chat(
            request.messages,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            add_special_tokens=request.add_special_tokens,
            size=request.num_bytes,
            documents=request.documents,
            variables=variables,
            tools=tools.for_template() if tools else (),
            max_model_len=None if request.truncate_prompt_tokens is not None else limits.max_model_len,
        )
        bad_words = await model.prompts.run(request.num_bytes, lambda: bad_word_ids(request, model.tokenizer))
    asked = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    if asked == 0 and request.prompt_logprobs is None:
        raise bad_request("max_completion_tokens must be at least 1", "max_completion_tokens")
    if asked is not None:
        asked = model.defaults.limited(asked)
    token_ids = truncate_prompt(
        token_ids, request.truncate_prompt_tokens, max_model_len=limits.max_model_len, max_tokens=asked
    )
    room = room_for_output(len(token_ids), asked, max_model_len=limits.max_model_len, param="messages")
    max_tokens = model.defaults.limited(room)
    sampling = sampling_params(
        request,
        max_tokens=max_tokens,
        bad_words=bad_words,
        vocab_size=limits.vocab_size,
        defaults=model.defaults,
        structured_output=structured and _after_reasoning(structured, model, token_ids, variables)
        # Calls are looked for in the answer alone.
        if tools is not None or not state.settings.structured_output_in_reasoning
        else structured,
    )
    choices = make_choices(
        request,
        model,
        [(token_ids, sampling)],
        lambda prompt: model.new_reasoning_parser(prompt, variables),
        new_tool_parser=(lambda: tools.new_parser(model)) if tools else None,
        longest_timeout=state.settings.request_timeout,
    )
    chat_answer = _answer(request, name, model, token_ids, state.settings.reasoning_fields)
    generates(http_request.scope, "chat", name, choices, chat_answer.usage)
    return await answer(
        http_request,
        state,
        model,
        choices,
        chunks=(lambda: ChatChunks(chat_answer)) if request.stream else None,
        whole=chat_answer.whole,
        usage=chat_answer.usage,
    )


def _after_reasoning(
    structured: StructuredOutput,
    model: LoadedModel,
    prompt_token_ids: list[int],
    variables: dict[str, Any],
) -> StructuredOutput:
    """Where the model reasons first, its grammar begins with the answer."""
    parser = model.new_reasoning_parser(prompt_token_ids, variables)
    if parser is None or parser.ahead is None:
        return structured
    start, end, opened = parser.ahead
    return msgspec.structs.replace(structured, reasoning_start=start, reasoning_end=end, reasoning_opened=opened)


def _template_variables(request: ChatCompletionRequest) -> dict[str, Any]:
    variables = dict(request.chat_template_kwargs or {})
    if request.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", request.reasoning_effort)
    return variables


def _answer(
    request: ChatCompletionRequest, name: str, model: LoadedModel, token_ids: list[int], reasoning_fields: Sequence[str]
) -> ChatAnswer:
    n = request.n or 1
    splits_reasoning = model.reasoning_parser is not None
    last = request.messages[-1]
    return ChatAnswer(
        head=AnswerHead("chatcmpl", "chat.completion.chunk" if request.stream else "chat.completion", name),
        num_choices=n,
        usage=Usage([len(token_ids)], n, with_reasoning=True),
        logprobs=LogprobFormat(
            model.tokenizer, request.top_logprobs or 0, as_token_ids=bool(request.return_tokens_as_token_ids)
        ),
        prompt_logprobs=LogprobFormat(model.tokenizer, request.prompt_logprobs or 0),
        reasoning_fields=reasoning_fields if splits_reasoning and request.include_reasoning is not False else (),
        splits_reasoning=splits_reasoning,
        include_usage=request.include_usage,
        continuous_usage=request.continuous_usage,
        echo=(last.content or "") if request.echo and last.role == "assistant" else "",
        prompt_token_ids=token_ids if request.return_token_ids else None,
    )
