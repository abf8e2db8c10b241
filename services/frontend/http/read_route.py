"""A GET route that answers HEAD too, which load balancers and uptime checks send. The server leaves the body out."""

from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

_METHODS = ("GET", "HEAD")


class ReadRoute(APIRoute):
    """For `APIRouter(route_class=…)`, of GET routes alone. The OpenAPI document has them once, as GET."""

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] not in _METHODS:
            raise HTTPException(405, headers={"Allow": ", ".join(_METHODS)})
        await self.app(scope, receive, send)
