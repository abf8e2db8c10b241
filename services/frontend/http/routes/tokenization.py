"""POST /tokenize and /detokenize: what a prompt becomes, without running it."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from services.frontend.http.direct_route import DirectRoute
from services.frontend.http.json_bytes import json_bytes
from services.frontend.http.openapi import documented
from services.frontend.http.parsing import parse_body
from services.frontend.http.schemas.responses import Detokenized, Tokenized
from services.frontend.http.schemas.tokenization import DetokenizeRequest, TokenizeRequest
from services.frontend.http.state import frontend_state
from services.frontend.prompts.limits import check_prompt_ids

router = APIRouter(route_class=DirectRoute)


@router.post("/tokenize", **documented(TokenizeRequest, Tokenized))
async def tokenize(http_request: Request) -> Response:
    """The token ids of a text, or of a conversation after its template."""
    state = frontend_state(http_request)
    request = await parse_body(http_request, TokenizeRequest)
    _, model = state.model(request.model)
    with state.preparing():
        if request.prompt is not None:
            (token_ids,) = await model.prompts.encode(
                [request.prompt], add_special_tokens=request.add_special_tokens is not False
            )
        else:
            token_ids = await model.prompts.encode_chat(
                request.messages or [],
                add_generation_prompt=request.add_generation_prompt,
                continue_final_message=request.continue_final_message,
                add_special_tokens=bool(request.add_special_tokens),
                size=request.num_bytes,
                variables=request.chat_template_kwargs,
                tools=[tool.for_template() for tool in request.tools or ()],
            )
        token_strs = None
        if request.return_token_strs:
            token_strs = await model.prompts.run(
                len(token_ids), lambda: [model.tokenizer.token_text(token_id) for token_id in token_ids]
            )
    limits = model.engines.limits
    body = {
        "count": len(token_ids),
        "max_model_len": None if limits is None else limits.max_model_len,
        "tokens": token_ids,
        "token_strs": token_strs,
    }
    return Response(json_bytes(body), media_type="application/json")


@router.post("/detokenize", **documented(DetokenizeRequest, Detokenized))
async def detokenize(http_request: Request) -> Response:
    """The text of token ids, special tokens included."""
    state = frontend_state(http_request)
    request = await parse_body(http_request, DetokenizeRequest)
    _, model = state.model(request.model)
    tokens, vocab_size = request.tokens, model.tokenizer.vocab_size
    with state.preparing():
        # Unlike a prompt's, as many as a body holds.
        await model.prompts.run(len(tokens), lambda: check_prompt_ids(tokens, vocab_size, "tokens"))
        text = await model.prompts.decode(tokens, skip_special_tokens=False)
    return Response(json_bytes({"prompt": text}), media_type="application/json")
