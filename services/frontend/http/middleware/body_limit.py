"""Refuses request bodies over the limit, whether they say their length first or come in chunks, and those that stop
coming."""

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.frontend.http.errors import ApiError

# Between two pieces of a body (nginx's client_body_timeout).
STALLED_SECONDS = 60.0


class BodyLimit:
    """What was announced too long is refused unread; what turns out too long, as soon as it does."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        for name, value in scope["headers"]:
            # The HTTP parser has checked that it is a number; a fake server in a test may not have.
            if name == b"content-length" and (not value.isdigit() or int(value[:19]) > self._max_bytes):
                await self._too_large().response()(scope, receive, send)
                return
        received = 0
        complete = False

        async def receive_limited() -> Message:
            nonlocal received, complete
            if complete:  # what follows is the disconnect, which may take its time
                return await receive()
            try:
                async with asyncio.timeout(STALLED_SECONDS):
                    message = await receive()
            except TimeoutError:
                raise _stalled() from None
            complete = not message.get("more_body", False)
            if message["type"] == "http.request":
                received += len(message.get("body", b""))
                if received > self._max_bytes:
                    # Raised where the application reads, it is answered like any other of its errors.
                    raise self._too_large()
            return message

        await self._app(scope, receive_limited, send)

    def _too_large(self) -> ApiError:
        return ApiError(
            413,
            f"the request body is over this server's limit of {self._max_bytes} bytes",
            code="request_too_large",
            # The rest of the body is not waited for.
            headers={"connection": "close"},
        )


def _stalled() -> ApiError:
    return ApiError(
        408,
        f"nothing more of the request body came for {STALLED_SECONDS:g} seconds",
        headers={"connection": "close"},
    )
