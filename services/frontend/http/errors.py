"""Every error that a client can see: one exception, one table from status to type, OpenAI's JSON.

Prompts and engines raise errors of their own; this is where they get their status.
"""

import math
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.frontend.generation import GenerationError
from services.frontend.http.json_bytes import json_bytes
from services.frontend.prompts.errors import InvalidPrompt
from shared.sampling_params import InvalidSamplingParams

CLIENT_CLOSED_REQUEST = 499

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}

# Words for the metrics. What another word tells better says so itself.
_REASONS = {
    400: "invalid",
    401: "unauthorized",
    404: "not_found",
    405: "invalid",
    408: "slow_body",
    413: "too_large",
    415: "invalid",
    429: "server_limit",
    503: "no_engine",
    504: "timeout",
}
# Set in the ASGI scope for the access log and the metrics: why the request was answered with an error.
ERROR_REASON = "tandem.error_reason"


class ApiError(Exception):
    """A request is answered with `status`. `param` names the field at fault; `retry_after` is in seconds."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
        headers: dict[str, str] | None = None,
        reason: str = "",
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        self.reason = reason or _REASONS.get(status, "failed" if status >= 500 else "invalid")
        if retry_after is not None:
            self.headers["retry-after"] = str(max(1, math.ceil(retry_after)))

    def body(self) -> dict[str, Any]:
        """OpenAI's error JSON, also sent in-band once a stream has begun."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        return _ErrorResponse(json_bytes(self.body()), self.status, self.headers, self.reason)


class _ErrorResponse(Response):
    def __init__(self, body: bytes, status: int, headers: dict[str, str], reason: str) -> None:
        super().__init__(body, status, headers, "application/json")
        self._reason = reason

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[ERROR_REASON] = self._reason
        await super().__call__(scope, receive, send)


class ClientDisconnected(Exception):
    """The client left before it was answered."""


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400 that names the field."""
    return ApiError(400, message, param=param, code=code)


def api_error(error: BaseException) -> ApiError:
    """What the client is told of any exception; what it must not see becomes a plain 500."""
    match error:
        case ApiError():
            return error
        case InvalidPrompt():
            return bad_request(error.message, error.param, error.code)
        case InvalidSamplingParams():
            return bad_request(str(error), error.field)
        case GenerationError():
            retry_after = error.retry_after
            if retry_after is None and error.status in (429, 503):
                retry_after = 1.0
            return ApiError(error.status, error.message, retry_after=retry_after, reason=error.reason)
        case _:
            return ApiError(500, "the server failed on this request; its log says why", code="internal_error")


async def answer_error(request: Request, error: Exception) -> Response:
    """FastAPI's exception handler for the errors above."""
    return api_error(error).response()


async def answer_disconnected(request: Request, error: Exception) -> Response:
    """Nobody reads this; the access log and the metrics do."""
    return Response(status_code=CLIENT_CLOSED_REQUEST)


async def answer_http_exception(request: Request, error: Exception) -> Response:
    """Starlette's own refusals: no such path, or not with this method."""
    assert isinstance(error, HTTPException)
    path = request.url.path[:200]
    match error.status_code:
        case 404:
            message = f"there is no {path} here; /docs lists what there is"
        case 405:
            message = f"{path} does not take {request.method}"
        case _:
            message = str(error.detail)
    return ApiError(error.status_code, message, headers=dict(error.headers or {})).response()
