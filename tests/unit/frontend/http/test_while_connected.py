"""A request's work ends with its client, and with nothing else."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from starlette.types import Message

from services.frontend.http.disconnect import while_connected
from services.frontend.http.errors import ClientDisconnected


class Client:
    """What `receive` gives of a client that has sent its request."""

    def __init__(self, *messages: Message | Exception) -> None:
        self._messages: asyncio.Queue[Message | Exception] = asyncio.Queue()
        for message in messages:
            self._messages.put_nowait(message)

    def leave(self) -> None:
        self._messages.put_nowait({"type": "http.disconnect"})

    async def receive(self) -> Message:
        message = await self._messages.get()
        if isinstance(message, Exception):
            raise message
        return message


def run(client: Client, work: Coroutine[Any, Any, Any]) -> Any:
    """What while_connected returns or raises. Nothing may run on after it."""

    async def main() -> Any:
        try:
            return await while_connected(client.receive, work)
        finally:
            while len(asyncio.all_tasks()) > 1:
                await asyncio.sleep(0)

    async def in_time() -> Any:
        async with asyncio.timeout(60):
            return await main()

    return asyncio.run(in_time())


def test_gives_the_works_result() -> None:
    async def work() -> int:
        await asyncio.sleep(0)
        return 7

    assert run(Client(), work()) == 7


@pytest.mark.parametrize("error", [TimeoutError("its own"), ValueError("wrong")])
def test_passes_on_what_the_work_raises(error: Exception) -> None:
    async def work() -> None:
        raise error

    with pytest.raises(type(error)) as raised:
        run(Client(), work())
    assert raised.value is error


def test_cancels_the_work_of_a_client_that_left() -> None:
    client = Client({"type": "http.request"})  # what is not the disconnect is passed over
    cancelled = False

    async def work() -> None:
        nonlocal cancelled
        client.leave()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled = True
            raise

    with pytest.raises(ClientDisconnected):
        run(client, work())
    assert cancelled


def test_takes_a_connection_that_fails_for_one_that_ended() -> None:
    async def work() -> None:
        await asyncio.Event().wait()

    with pytest.raises(ClientDisconnected):
        run(Client(OSError("reset")), work())


def test_a_client_that_leaves_as_the_work_ends_changes_nothing() -> None:
    client = Client()

    async def work() -> str:
        client.leave()
        return "done"

    assert run(client, work()) == "done"


def test_is_cancelled_like_any_other_coroutine() -> None:
    async def work() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.Event().wait()

    with pytest.raises(asyncio.CancelledError):
        run(Client(), work())


def test_a_client_that_leaves_in_the_turn_in_which_the_work_ends_leaves_no_error() -> None:
    async def main() -> None:
        errors: list[dict[str, Any]] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: errors.append(context))
        gone: asyncio.Future[Message] = loop.create_future()
        output: asyncio.Future[int] = loop.create_future()

        async def receive() -> Message:
            return await gone

        async def work() -> int:
            return await output

        answering = asyncio.ensure_future(while_connected(receive, work()))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        gone.set_result({"type": "http.disconnect"})
        output.set_result(7)
        assert await answering == 7
        await asyncio.sleep(0)
        assert errors == []

    asyncio.run(main())
