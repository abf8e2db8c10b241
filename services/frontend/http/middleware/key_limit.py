"""Bounds how many requests of one API key are answered at once, so that one client cannot take the whole server."""

from collections import Counter

from starlette.types import ASGIApp, Receive, Scope, Send

from services.frontend.http.errors import ApiError
from services.frontend.http.middleware.api_keys import KEY

_RETRY_AFTER = 1.0  # seconds


class KeyLimit:
    """Inside of ApiKeys, which says whose a request is. A stream counts until its last byte, or its client is gone."""

    def __init__(self, app: ASGIApp, max_requests: int) -> None:
        self._app = app
        self._max_requests = max_requests
        self._running: Counter[int] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        key = scope.get(KEY)
        if key is None:
            await self._app(scope, receive, send)
            return
        if self._running[key] >= self._max_requests:
            error = ApiError(
                429,
                f"this API key already has {self._max_requests} requests being answered; try again when one is done",
                code="too_many_requests_of_key",
                retry_after=_RETRY_AFTER,
                reason="key_limit",
            )
            await error.response()(scope, receive, send)
            return
        self._running[key] += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._running[key] -= 1
