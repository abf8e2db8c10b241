"""The OpenAPI document: what FastAPI knows of the routes, and the bodies that the routes parse themselves."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from services.frontend.http.middleware.api_keys import OPEN_PATHS
from services.frontend.http.schemas.chat import ChatCompletionRequest
from services.frontend.http.schemas.completion import CompletionRequest
from services.frontend.http.schemas.responses import ErrorResponse, schema_of
from services.frontend.http.schemas.tokenization import DetokenizeRequest, TokenizeRequest

_REQUESTS = (ChatCompletionRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest)

_ERRORS = {
    400: "The body is not JSON, or a field is wrong: `param` names it.",
    401: "An API key is needed.",
    404: "There is no such model.",
    413: "The body is too large.",
    415: "The body is not declared as JSON.",
    429: "Too many requests; Retry-After says when to come again.",
    500: "The server or an engine failed on this request.",
    503: "No engine is ready; Retry-After says when to come again.",
    504: "The request's `timeout` has passed.",
}


def documented(
    request: type[BaseModel] | None, response: type[BaseModel], *, streams: bool = False, errors: tuple[int, ...] = ()
) -> dict[str, Any]:
    """The documentation of a route that takes `request` as JSON and answers `response`: the decorator's arguments."""
    codes = errors or (tuple(_ERRORS) if streams else (400, 401, 404, 413, 415, 429) if request else (401,))
    success: dict[str, Any] = {"model": response, "description": "The answer."}
    if streams:
        success["content"] = {
            "text/event-stream": {
                "itemSchema": {
                    "type": "object",
                    "properties": {"data": {"type": "string", "description": "A chunk as JSON; at the end [DONE]."}},
                    "required": ["data"],
                },
                "example": 'data: {"id": …, "choices": […]}\n\ndata: [DONE]\n\n',
            }
        }
        success["description"] = "The answer; with `stream` its chunks, then [DONE]."
    arguments: dict[str, Any] = {
        "response_model": None,
        "responses": {200: success} | {code: {"model": ErrorResponse, "description": _ERRORS[code]} for code in codes},
    }
    if request is not None:
        arguments["openapi_extra"] = {
            "requestBody": {"required": True, "content": {"application/json": {"schema": schema_of(request)}}}
        }
    return arguments


def install_openapi(app: FastAPI, *, with_api_keys: bool) -> None:
    """Have the app's document hold the schemas of the bodies too, and say where an API key is needed."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
            _, definitions = models_json_schema(
                [(model, "validation") for model in _REQUESTS], ref_template="#/components/schemas/{model}"
            )
            schema["components"]["schemas"].update(definitions["$defs"])
            if with_api_keys:
                _demand_api_keys(schema)
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = document


def _demand_api_keys(schema: dict[str, Any]) -> None:
    schema["components"]["securitySchemes"] = {"api_key": {"type": "http", "scheme": "bearer"}}
    for path, operations in schema["paths"].items():
        if path not in OPEN_PATHS:
            for operation in operations.values():
                operation["security"] = [{"api_key": []}]
