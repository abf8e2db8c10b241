"""From a request's bytes to a validated model, or to a 400 that names the field."""

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from pydantic import ValidationError
from pydantic_core import from_json
from starlette.requests import Request

from services.frontend.http.errors import ApiError, bad_request
from services.frontend.http.json_size import check_json_size
from services.frontend.http.schemas.fields import RequestBody

logger = logging.getLogger(__name__)

_LARGE_BODY = 65_536  # bytes
_MAX_REMEMBERED_FIELDS = 1000
_unknown_fields_seen: set[str] = set()

Body = TypeVar("Body", bound=RequestBody)


async def parse_body(request: Request, model: type[Body]) -> Body:
    """The body as `model`. Raises ApiError 400 or 415."""
    content_type = request.headers.get("content-type", "").split(";", 1)[0].strip().lower()
    # Anything else could be sent across origins by a web page without a preflight.
    if content_type != "application/json":
        raise ApiError(415, "the body must be JSON, with the header Content-Type: application/json")
    # Not request.body(), which would keep the bytes as long as the answer streams.
    body = b"".join([chunk async for chunk in request.stream()])
    await check_json_size(body)
    return parse_json(body, model)


def parse_json(body: bytes, model: type[Body]) -> Body:
    """`body` as `model`. Raises ApiError 400."""
    try:
        with _without_collections(len(body)):
            value = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise bad_request(f"the body is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise bad_request("the body must be a JSON object")
    try:
        with _without_collections(len(body)):
            parsed = model.model_validate(value).with_num_bytes(len(body))
    except ValidationError as error:
        raise _invalid_field(error) from error
    for name, reason in model.unsupported.items():
        if value.get(name):
            raise bad_request(f"{name} cannot be used: {reason}", name)
    if parsed.model_extra:
        _warn_of_unknown_fields(parsed.model_extra, model)
    return parsed


@contextmanager
def _without_collections(num_bytes: int) -> Iterator[None]:
    """Millions of new objects would have the garbage collector look through all of them again and again: it takes
    most of the time that a large body does."""
    pausing = num_bytes > _LARGE_BODY and gc.isenabled()
    if pausing:
        gc.disable()
    try:
        yield
    finally:
        if pausing:
            gc.enable()


def _invalid_field(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    param = _field_path(first["loc"])
    message = first["msg"].removeprefix("Value error, ").removeprefix("Input ").removeprefix("Field ")
    if first["type"] == "missing":
        message = "is required"
    return bad_request(f"{param} {message}" if param else message, param or None)


def _field_path(location: tuple[int | str, ...]) -> str:
    """('messages', 0, 'role') as OpenAI writes it: messages[0].role."""
    path = ""
    for step in location:
        path += f"[{step}]" if isinstance(step, int) else f".{step[:64]}" if path else step[:64]
    return path


def _warn_of_unknown_fields(fields: dict[str, object], model: type[RequestBody]) -> None:
    for name in fields.keys() - model.unsupported.keys():
        # Names are the client's: of each only so much is kept.
        name = name[:64]
        if name not in _unknown_fields_seen and len(_unknown_fields_seen) < _MAX_REMEMBERED_FIELDS:
            _unknown_fields_seen.add(name)
            logger.warning("%s has no field %r: it is ignored, here and in later requests", model.__name__, name)
