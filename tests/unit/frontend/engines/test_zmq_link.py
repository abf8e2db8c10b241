"""The ZMQ link against a bare ROUTER: nothing is lost, nothing stalls, and what becomes of the peer is told."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest
import uvloop
import zmq

from services.frontend.engines.zmq_link import MESSAGES_PER_PASS, PASS_SECONDS, ZmqLink, ZmqTransport

IDENTITY = b"tfrontend"


class Listener:
    def __init__(self) -> None:
        self.received: list[bytes] = []
        self.ups = 0
        self.downs: list[str] = []
        self.failures: list[str] = []
        self.on_message: Callable[[bytes], None] = lambda data: None

    def link_up(self) -> None:
        self.ups += 1

    def link_down(self, reason: str) -> None:
        self.downs.append(reason)

    def link_failed(self, reason: str) -> None:
        self.failures.append(reason)

    def link_received(self, data: bytes) -> None:
        self.received.append(data)
        self.on_message(data)


class Router:
    def __init__(self, port: int = 0) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.set(zmq.ROUTER_HANDOVER, 1)
        self.socket.set(zmq.LINGER, 0)
        self.socket.set(zmq.SNDHWM, 0)
        self.socket.set(zmq.RCVHWM, 0)
        self.socket.bind(f"tcp://127.0.0.1:{port}")
        self.port = int(self.socket.get(zmq.LAST_ENDPOINT).decode().rpartition(":")[2].rstrip("\0"))

    def send(self, data: bytes) -> None:
        self.socket.send_multipart([IDENTITY, data])

    def receive_all(self) -> list[bytes]:
        messages = []
        with contextlib.suppress(zmq.Again):
            while True:
                identity, data = self.socket.recv_multipart(zmq.NOBLOCK)
                assert identity == IDENTITY
                messages.append(data)
        return messages

    def close(self) -> None:
        self.socket.close()
        self.context.term()


@contextlib.asynccontextmanager
async def linked() -> AsyncIterator[tuple[Router, ZmqLink, Listener]]:
    router, listener = Router(), Listener()
    transport = ZmqTransport(heartbeat_interval=1, heartbeat_timeout=5)
    link = transport.open(f"127.0.0.1:{router.port}", IDENTITY, listener)
    await until(lambda: listener.ups == 1)
    try:
        yield router, link, listener
    finally:
        link.close()
        router.close()
        await transport.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Callable[[], Coroutine[Any, Any, None]]], None]:
    def run_on_loop(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
        factory = uvloop.new_event_loop if request.param == "uvloop" else asyncio.new_event_loop
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(main())

    return run_on_loop


Run = Callable[[Callable[[], Coroutine[Any, Any, None]]], None]


def test_a_burst_arrives_whole_and_in_order(run: Run) -> None:
    async def main() -> None:
        async with linked() as (router, link, listener):
            assert link.send(b"here")
            await until(lambda: router.receive_all() == [b"here"])
            expected = [str(index).encode() for index in range(MESSAGES_PER_PASS * 5 + 3)]
            for data in expected:
                router.send(data)
            await until(lambda: len(listener.received) == len(expected))
            assert listener.received == expected

    run(main)


def test_sending_while_messages_arrive_never_leaves_one_unread(run: Run) -> None:
    # A send may take the descriptor's only sign that a message came: every answer must still be read at once.
    async def main() -> None:
        async with linked() as (router, link, listener):
            answered = 0

            def serve() -> None:
                nonlocal answered
                for data in router.receive_all():
                    router.send(data)
                    answered += 1

            for round_ in range(300):
                for _ in range(3):
                    assert link.send(b"%d" % round_)
                    serve()
                await asyncio.sleep(0)
            await until(lambda: (serve(), len(listener.received) == 900)[1])
            assert answered == 900

    run(main)


async def most_messages_in_a_turn(count: int, take: Callable[[], None]) -> int:
    """Of `count` that come at once, in one turn of the loop; `take` is called for each."""
    async with linked() as (router, link, listener):
        link.send(b"here")
        await until(lambda: bool(router.receive_all()))
        turns = 0
        at_message: list[int] = []

        def on_message(data: bytes) -> None:
            at_message.append(turns)
            take()

        listener.on_message = on_message
        for _ in range(count):
            router.send(b"x")

        async def other_work() -> None:
            nonlocal turns
            while len(at_message) < count:
                turns += 1
                await asyncio.sleep(0)

        await asyncio.wait_for(other_work(), 10)
        return max(at_message.count(turn) for turn in set(at_message))


def test_one_busy_link_leaves_the_loop_to_others(run: Run) -> None:
    async def main() -> None:
        assert await most_messages_in_a_turn(MESSAGES_PER_PASS * 10, lambda: None) <= 2 * MESSAGES_PER_PASS

    run(main)


def test_messages_that_take_long_leave_the_loop_to_others_after_each(run: Run) -> None:
    async def main() -> None:
        # A turn may have a pass of the descriptor's, and one of those that go on.
        assert await most_messages_in_a_turn(MESSAGES_PER_PASS, lambda: time.sleep(PASS_SECONDS)) <= 2

    run(main)


def test_a_peer_that_goes_is_told_and_nothing_is_queued_for_it(run: Run) -> None:
    async def main() -> None:
        async with linked() as (router, link, listener):
            port = router.port
            router.close()
            await until(lambda: len(listener.downs) == 1)
            assert not link.send(b"for nobody")
            router.__init__(port)  # type: ignore[misc]
            await until(lambda: listener.ups == 2)
            assert link.send(b"for the new one")
            messages: list[bytes] = []
            await until(lambda: bool(messages.extend(router.receive_all()) or messages))
            assert messages == [b"for the new one"]

    run(main)


def test_reset_makes_a_new_connection_and_close_ends_it(run: Run) -> None:
    async def main() -> None:
        async with linked() as (router, link, listener):
            link.reset()
            await until(lambda: listener.ups == 2)
            assert link.send(b"again")
            await until(lambda: bool(router.receive_all()))
            link.close()
            assert not link.send(b"closed")
            router.send(b"to nobody")
            await asyncio.sleep(0)
            assert listener.received == []
            assert listener.downs == []

    run(main)


def test_a_listener_that_resets_while_it_reads_gets_nothing_of_the_old_connection(run: Run) -> None:
    async def main() -> None:
        async with linked() as (router, link, listener):
            link.send(b"here")
            await until(lambda: bool(router.receive_all()))
            listener.on_message = lambda data: link.reset()
            for index in range(10):
                router.send(b"%d" % index)
            await until(lambda: listener.ups == 2)
            assert listener.received == [b"0"]

    run(main)


def test_the_end_of_the_watch_is_noticed_and_repaired(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with linked() as (_, link, listener):
            assert link._socket is not None
            # As if the monitor had died: ZMQ says so on its way out.
            link._socket.monitor(None, 0)  # type: ignore[arg-type]
            await until(lambda: listener.ups == 2)
            assert listener.downs == ["the watch on the connection ended"]
            assert "the watch on the connection to engine" in caplog.text

    run(main)


def test_what_was_sent_before_close_arrives(run: Run) -> None:
    async def main() -> None:
        router, listener = Router(), Listener()
        transport = ZmqTransport(heartbeat_interval=1, heartbeat_timeout=5)
        link = transport.open(f"127.0.0.1:{router.port}", IDENTITY, listener)
        await until(lambda: listener.ups == 1)
        assert link.send(b"farewell")
        link.close()
        await transport.close()
        messages: list[bytes] = []
        await until(lambda: bool(messages.extend(router.receive_all()) or messages))
        assert messages == [b"farewell"]
        router.close()

    run(main)
