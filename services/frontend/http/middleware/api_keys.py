"""Lets only those in who send one of the API keys as a bearer token; probes and the documentation stay open."""

import hashlib
import hmac
from collections.abc import Sequence
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from services.frontend.http.errors import ApiError
from services.frontend.settings import FrontendSettings

OPEN_PATHS = frozenset(
    {
        "/health",
        "/health/live",
        "/health/ready",
        "/metrics",
        "/version",
        "/docs",
        "/docs/oauth2-redirect",
        "/openapi.json",
    }
)


# Which of the keys a request has, as a number, in the ASGI scope; not set on paths that need none.
KEY = "tandem.api_key"


class ApiKeys:
    """Keys are kept as digests, and each is compared in constant time, so an answer's time tells nothing of them."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        key = self._key_of(scope)
        if key is not None:
            scope[KEY] = key
            await self._app(scope, receive, send)
            return
        error = ApiError(
            401,
            "an API key is needed: send it as the header Authorization: Bearer KEY",
            code="invalid_api_key",
            headers={"www-authenticate": "Bearer"},
        )
        await error.response()(scope, receive, send)

    def _key_of(self, scope: Scope) -> int | None:
        for name, value in scope["headers"]:
            if name == b"authorization":
                scheme, _, key = value.partition(b" ")
                digest = _digest(key.strip())
                # All are compared: a loop that stops at the match would tell which key it was.
                matches = [hmac.compare_digest(digest, known) for known in self._digests]
                return matches.index(True) if scheme.lower() == b"bearer" and any(matches) else None
        return None


def configured_keys(settings: FrontendSettings) -> list[str]:
    """The keys of the settings and of their file. Raises ValueError where keys are wanted but there are none."""
    keys = [*settings.api_key]
    if "api_key" in settings.model_fields_set and not keys and settings.api_key_file is None:
        # A secret that came out empty must not open the server to everybody.
        raise ValueError("an API key is set, but it is empty: give one, or leave the setting out")
    if settings.api_key_file is not None:
        keys += _read_keys(settings.api_key_file)
    if any(not key or key != key.strip() for key in keys):
        raise ValueError("an API key must not be empty, nor begin or end with a blank")
    return keys


def _read_keys(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"the API key file {path} cannot be read: {error}") from error
    keys = [line.strip() for line in lines if line.strip()]
    if not keys:
        # To go on would open the server to everybody.
        raise ValueError(f"the API key file {path} holds no key: put one on each line")
    return keys


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
