"""GET /engines: the engines behind this frontend, for operators; `tandem top` shows them."""

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from services.frontend.http.json_bytes import json_bytes
from services.frontend.http.openapi import documented
from services.frontend.http.read_route import ReadRoute
from services.frontend.http.schemas.responses import EngineList
from services.frontend.http.state import frontend_state

router = APIRouter(route_class=ReadRoute)


@router.get("/engines", **documented(None, EngineList))
async def list_engines(request: Request) -> Response:
    """Every engine that this process knows of: its state, and the load that it last told."""
    engines: list[dict[str, Any]] = [
        {"model": model.names[0], **asdict(status)}
        for model in frontend_state(request).models
        for status in model.engines.statuses()
    ]
    return Response(json_bytes({"object": "list", "data": engines}), media_type="application/json")
