"""GET /v1/models and /v1/models/{id}."""

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from services.frontend.http.json_bytes import json_bytes
from services.frontend.http.loaded_model import LoadedModel
from services.frontend.http.openapi import documented
from services.frontend.http.read_route import ReadRoute
from services.frontend.http.schemas.responses import ModelCard, ModelList
from services.frontend.http.state import frontend_state

router = APIRouter(route_class=ReadRoute)


@router.get("/v1/models", **documented(None, ModelList))
async def list_models(request: Request) -> Response:
    """Every name under which a model is served."""
    cards = [_card(name, model) for name, model in frontend_state(request).names()]
    return Response(json_bytes({"object": "list", "data": cards}), media_type="application/json")


@router.get("/v1/models/{model_id:path}", **documented(None, ModelCard, errors=(401, 404)))
async def retrieve_model(request: Request, model_id: str) -> Response:
    """One of them."""
    name, model = frontend_state(request).model(model_id)
    return Response(json_bytes(_card(name, model)), media_type="application/json")


def _card(name: str, model: LoadedModel) -> dict[str, Any]:
    limits = model.engines.limits
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "tandem",
        "root": model.root,
        "max_model_len": None if limits is None else limits.max_model_len,
    }
