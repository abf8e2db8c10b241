"""From a request's bytes to a validated model, or to a 400 that names the field."""

import logging
from itertools import islice
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import from_json
from starlette.requests import Request

from services.frontend.http.errors import ApiError, bad_request
from services.frontend.http.json_body import PART_BYTES, read_json
from services.frontend.http.schemas.fields import RequestBody
from services.frontend.http.turns import Turns
from services.frontend.prompts.messages import ChatMessage

logger = logging.getLogger(__name__)

_MAX_REMEMBERED_FIELDS = 1000
_MAX_LOGGED_FIELDS = 20  # of one request
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
    if len(body) <= PART_BYTES:
        return parse_json(body, model)
    turns = Turns()
    try:
        value = await read_json(body, turns, model.reads)
    except ValueError as error:
        raise _not_json(error) from error
    await turns.next()
    await _validate_messages(value, turns)
    await turns.next()
    return _validate(value, model, len(body))


def parse_json(body: bytes, model: type[Body]) -> Body:
    """`body` as `model`, at once. Raises ApiError 400."""
    try:
        value = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise _not_json(error) from error
    return _validate(value, model, len(body))


def _not_json(error: ValueError) -> ApiError:
    return bad_request(f"the body is not valid JSON: {error}")


async def _validate_messages(value: Any, turns: Turns) -> None:
    """Turn the messages of a long conversation into models, one by one, up to the first that is wrong: what is wrong
    with it is found again, in its place among the other fields."""
    messages = value.get("messages") if isinstance(value, dict) else None
    if not isinstance(messages, list):
        return
    for index, message in enumerate(messages):
        try:
            messages[index] = ChatMessage.model_validate(message)
        except ValidationError:
            del messages[index + 1 :]
            return
        if turns.over:
            await turns.next()


def _validate(value: Any, model: type[Body], num_bytes: int) -> Body:
    if not isinstance(value, dict):
        raise bad_request("the body must be a JSON object")
    try:
        parsed = model.model_validate(value).with_num_bytes(num_bytes)
    except ValidationError as error:
        raise _invalid_field(error) from error
    for name, reason in model.unsupported.items():
        if value.get(name):
            raise bad_request(f"{name} cannot be used: {reason}", name)
    if parsed.model_extra:
        _warn_of_unknown_fields(parsed.model_extra, model)
    return parsed


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
    # A line takes a while to log.
    for name in islice(fields.keys() - model.unsupported.keys(), _MAX_LOGGED_FIELDS):
        # Names are the client's: of each only so much is kept.
        name = name[:64]
        if name not in _unknown_fields_seen and len(_unknown_fields_seen) < _MAX_REMEMBERED_FIELDS:
            _unknown_fields_seen.add(name)
            logger.warning("%s has no field %r: it is ignored, here and in later requests", model.__name__, name)
