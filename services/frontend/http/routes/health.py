"""Probes, metrics and the version. None of them needs an API key."""

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from services.frontend.http.json_bytes import json_bytes
from services.frontend.http.read_route import ReadRoute
from services.frontend.http.schemas.responses import Health, Version
from services.frontend.http.state import frontend_state
from shared.version import server_version

router = APIRouter(route_class=ReadRoute)

_NOT_READY = {503: {"model": Health, "description": "No engine has answered, or the server drains."}}


@router.get("/health/live", response_model=Health, response_model_exclude_none=True)
async def live() -> Response:
    """The process answers. It says nothing of engines: to restart a frontend would bring none back."""
    return Response(json_bytes({"status": "alive"}), media_type="application/json")


@router.get("/health/ready", response_model=Health, response_model_exclude_none=True, responses={**_NOT_READY})
@router.get("/health", response_model=Health, response_model_exclude_none=True, responses={**_NOT_READY})
async def ready(request: Request) -> Response:
    """Requests are welcome: the server does not drain, and at least one model has an engine.

    One model without engines does not take the others away; `models` tells which has one. `engines_without_link`
    counts engines that were reached and could not be spoken with: a wrong key, most likely; the log has the reason.
    """
    state = frontend_state(request)
    status = "draining" if state.draining else "ready" if state.ready else "no engine"
    body: dict[str, Any] = {"status": status, "models": {each.names[0]: each.engines.ready for each in state.models}}
    refusing = {each.names[0]: each.engines.num_refusing for each in state.models if each.engines.num_refusing}
    if refusing:
        body["engines_without_link"] = refusing
    return Response(json_bytes(body), 200 if state.ready else 503, media_type="application/json")


@router.get("/version", response_model=Version)
async def show_version() -> Response:
    """This server's version."""
    return Response(json_bytes({"version": server_version()}), media_type="application/json")


@router.get("/metrics", include_in_schema=False)
async def metrics(request: Request) -> Response:
    """Prometheus' text format, or OpenMetrics where it is asked for."""
    accept = request.headers.get("accept", "")
    body, content_type = await frontend_state(request).metrics.exposition(accept)
    return Response(body, headers={"content-type": content_type})
