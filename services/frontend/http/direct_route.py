"""A route that FastAPI documents and does not serve: its endpoint takes the Request alone, so there is nothing to look
for in the request first. routes/ are made of it where requests are many; the app handles their errors."""

from collections.abc import Callable
from typing import Any

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.types import Receive, Scope, Send


class DirectRoute(APIRoute):
    """For `APIRouter(route_class=…)`. The endpoint parses its body itself and returns a Response."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        self._answer = endpoint

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] in self.methods:
            response = await self._answer(Request(scope, receive, send))
            await response(scope, receive, send)
        else:
            await super().handle(scope, receive, send)
