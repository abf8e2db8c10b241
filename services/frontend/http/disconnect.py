"""Runs the work of one request only as long as its client is there."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from services.frontend.http.errors import ClientDisconnected

Result = TypeVar("Result")


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The work's result. Raises ClientDisconnected, with the work cancelled, as soon as the client leaves.

    The request's body must have been read: what `receive` gives after it is the disconnect.
    """
    watching = asyncio.ensure_future(_disconnected(receive))
    # Without a time: it ends the work when it is told to, which takes no task for the work.
    connected = asyncio.timeout(None)

    working = True

    def left(watching: asyncio.Future[None]) -> None:
        if not watching.cancelled():
            watching.exception()  # whatever it is, the client is gone
            if working:  # else it was on its way here as the work ended, and the time is over for good
                connected.reschedule(0)

    try:
        async with connected:
            watching.add_done_callback(left)
            return await work
    except TimeoutError:
        if connected.expired():
            raise ClientDisconnected from None
        raise
    finally:
        working = False
        watching.remove_done_callback(left)
        watching.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
