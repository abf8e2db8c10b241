"""The link with real sockets: who is answered, who is dropped, and what each frontend is told."""

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from engine_harness import LinkFrontend, make_add, make_settings, wait_until, write_model

from services.engine import link as link_module
from services.engine import peers
from services.engine.core import EngineCore
from services.engine.executor.interface import ModelDescription
from services.engine.executor.simulated import SimulatedExecutor
from services.engine.kv_cache import BlockEvents
from services.engine.link import Link
from services.engine.link_items import FromPeer, PeerJoined, PeerLeft
from services.engine.loop import EngineLoop
from services.engine.mailbox import Inbox
from services.engine.router_socket import LinkBindError
from shared.protocol import (
    PROTOCOL_VERSION,
    Abort,
    FinishReason,
    Goodbye,
    Heartbeat,
    Hello,
    Load,
    ModelLimits,
    Outputs,
    RequestOutput,
    encode,
    new_boot_id,
)

LIMITS = ModelLimits(100, 50, [2], 4, 9)


class LinkEnd:
    """A started link whose loop is the test."""

    def __init__(self, model: Path, **overrides: Any) -> None:
        self.inbox: Inbox[FromPeer] = Inbox(overrides.pop("max_inbox_bytes", 1 << 20))
        self.alive = True
        self.ended: list[BaseException | None] = []
        self.link = Link(
            make_settings(model, **{"heartbeat_interval": 0.05, "heartbeat_timeout": 30.0, **overrides}),
            ModelDescription("model", "print", LIMITS),
            LIMITS,
            b"engine",
            self.inbox,
            is_alive=lambda: self.alive,
            on_end=self.ended.append,
        )
        self.link.start(Load(free_blocks=7))

    @property
    def port(self) -> int:
        return self.link.port

    def next_items(self, count: int = 1) -> list[FromPeer]:
        items: list[FromPeer] = []
        until = time.monotonic() + 10
        while len(items) < count and time.monotonic() < until:
            items += self.inbox.take_all(0.1)
        assert len(items) == count
        return items


@pytest.fixture
def open_link(tmp_path: Path) -> Iterator[Callable[..., LinkEnd]]:
    model = write_model(tmp_path / "model")
    opened: list[LinkEnd] = []

    def open_one(**overrides: Any) -> LinkEnd:
        opened.append(LinkEnd(model, **overrides))
        return opened[-1]

    yield open_one
    for end in opened:
        end.link.stop(linger=0.1)
        assert end.link.join(10)
        assert end.ended == [None]


def test_hello_is_answered_with_what_a_frontend_must_know(open_link: Callable[..., LinkEnd]) -> None:
    end = open_link()
    with LinkFrontend(end.port) as frontend:
        welcome = frontend.hello()
        assert (welcome.boot_id, welcome.model, welcome.fingerprint) == (b"engine", "model", "print")
        assert (welcome.limits, welcome.load.free_blocks, welcome.draining) == (LIMITS, 7, False)
        assert end.next_items() == [(frontend.identity, PeerJoined())]


def test_messages_reach_the_loop_in_order(open_link: Callable[..., LinkEnd]) -> None:
    end = open_link()
    with LinkFrontend(end.port) as frontend:
        frontend.hello()
        adds = [make_add(request_id, [5]) for request_id in range(20)]
        for add in adds:
            frontend.send(add)
        frontend.send(Abort([3]))
        assert [message for _, message in end.next_items(22)] == [PeerJoined(), *adds, Abort([3])]


def test_a_request_before_hello_must_go_elsewhere(open_link: Callable[..., LinkEnd]) -> None:
    end = open_link()
    with LinkFrontend(end.port) as frontend:
        frontend.send(Abort([1]))
        frontend.send(Heartbeat())
        frontend.send(make_add(7, [5]))
        (output,) = frontend.receive_a(Outputs).outputs
        assert (output.request_id, output.finish_reason) == (7, FinishReason.HANDED_OVER)
        frontend.hello()
        assert end.next_items() == [(frontend.identity, PeerJoined())]


@pytest.mark.parametrize(
    "bad",
    [
        b"",
        b"\xc1garbage",
        msgspec.msgpack.encode([99]),
        encode(Outputs([], Load())),
        encode(Hello(PROTOCOL_VERSION, b"somebody else")),
    ],
)
def test_malformed_messages_are_counted_and_hurt_nobody(open_link: Callable[..., LinkEnd], bad: bytes) -> None:
    end = open_link()
    with LinkFrontend(end.port) as good, LinkFrontend(end.port) as hostile:
        good.hello()
        hostile.hello()
        for _ in range(50):
            hostile.send(bad)
        wait_until(lambda: end.link.num_malformed == 50, "50 malformed messages are counted")
        good.send(make_add(1, [5]))
        assert end.next_items(3)[-1] == (good.identity, make_add(1, [5]))
        hostile.hello()


def test_several_frames_are_malformed(open_link: Callable[..., LinkEnd]) -> None:
    end = open_link()
    with LinkFrontend(end.port) as frontend:
        frontend.hello()
        frontend.socket.send_multipart([b"", encode(Abort([1]))])
        wait_until(lambda: end.link.num_malformed == 1, "the frames are counted")


def test_a_flood_of_malformed_messages_does_not_flood_the_log(
    open_link: Callable[..., LinkEnd], caplog: pytest.LogCaptureFixture
) -> None:
    end = open_link()
    with LinkFrontend(end.port) as frontend, caplog.at_level(logging.WARNING):
        frontend.hello()
        for _ in range(300):
            frontend.send(b"\xc1")
        wait_until(lambda: end.link.num_malformed == 300, "300 malformed messages are counted")
    assert len([record for record in caplog.records if "malformed" in record.message]) == 1


def test_a_message_over_the_limit_hurts_only_its_sender(open_link: Callable[..., LinkEnd]) -> None:
    end = open_link()
    with LinkFrontend(end.port) as good, LinkFrontend(end.port) as hostile:
        good.hello()
        hostile.hello()
        hostile.send(b"\0" * (64 * 1024 * 1024 + 1))
        good.send(make_add(1, [5]))
        assert good.receive_a(Heartbeat).load is not None
        wait_until(lambda: end.link.num_peers == 1, "the hostile peer is dropped")


@pytest.mark.parametrize(("version", "welcome"), [(PROTOCOL_VERSION + 1, True), (0, False)])
def test_versions_that_it_can_talk_to_are_welcome(
    open_link: Callable[..., LinkEnd], version: int, welcome: bool
) -> None:
    end = open_link()
    with LinkFrontend(end.port) as frontend:
        frontend.send(Hello(version, frontend.identity))
        answer = frontend.receive()
        if welcome:
            assert answer.boot_id == b"engine"  # type: ignore[union-attr]
        else:
            assert isinstance(answer, Goodbye)
            assert "update the frontend" in answer.reason


def test_each_frontend_gets_its_own_outputs_in_one_message(open_link: Callable[..., LinkEnd]) -> None:
    end = open_link(heartbeat_interval=20.0)
    with LinkFrontend(end.port) as one, LinkFrontend(end.port) as two:
        one.hello()
        two.hello()
        outputs = {
            one.identity: [RequestOutput(1, [5]), RequestOutput(2, [6])],
            two.identity: [RequestOutput(1, [7], FinishReason.LENGTH)],
            b"unknown": [RequestOutput(1, [8])],
        }
        end.link.send_outputs(outputs, Load(running_requests=3), BlockEvents())
        assert one.receive_a(Outputs).outputs == outputs[one.identity]
        message = two.receive_a(Outputs)
        assert message.outputs == outputs[two.identity]
        assert message.load.running_requests == 3


def test_every_frontend_learns_of_every_block_once(open_link: Callable[..., LinkEnd]) -> None:
    end = open_link()
    with LinkFrontend(end.port) as busy, LinkFrontend(end.port) as idle:
        busy.hello()
        idle.hello()
        end.link.send_cache_content(busy.identity, [100, 101])
        end.link.send_cache_content(idle.identity, [100, 101])
        events = BlockEvents()
        events.store(1)
        events.store(2)
        events.evict(100)
        end.link.send_outputs({busy.identity: [RequestOutput(1, [5])]}, Load(), events)
        for frontend in (busy, idle):
            stored: list[int] = []
            evicted: list[int] = []
            until = time.monotonic() + 10
            while not {1, 2, 101} <= set(stored):
                assert time.monotonic() < until
                message = frontend.receive()
                if isinstance(message, Outputs | Heartbeat):
                    stored += message.stored_block_hashes
                    evicted += message.evicted_block_hashes
            quiet = frontend.receive_a(Heartbeat)
            assert not quiet.stored_block_hashes
            assert not quiet.evicted_block_hashes
            # 100 was stored and evicted: told as both, or as neither.
            assert sorted(stored) in ([1, 2, 101], [1, 2, 100, 101])
            assert evicted == ([100] if 100 in stored else [])


def test_heartbeats_come_when_idle_and_stop_when_the_loop_hangs(open_link: Callable[..., LinkEnd]) -> None:
    end = open_link()
    with LinkFrontend(end.port) as frontend:
        frontend.hello()
        for _ in range(3):
            assert frontend.receive_a(Heartbeat).load == Load(free_blocks=7)
        end.alive = False
        wait_until(lambda: not frontend.socket.poll(150) or not frontend.receive(), "heartbeats stop")
        end.alive = True
        frontend.receive_a(Heartbeat)


def test_a_silent_frontend_is_taken_for_dead(open_link: Callable[..., LinkEnd]) -> None:
    end = open_link(heartbeat_timeout=0.3)
    with LinkFrontend(end.port) as silent, LinkFrontend(end.port) as alive:
        silent.hello()
        alive.hello()
        end.next_items(2)
        left: list[FromPeer] = []

        def silent_left() -> bool:
            alive.send(Heartbeat())
            left.extend(end.inbox.take_all(0))
            return bool(left)

        wait_until(silent_left, "the silent frontend is dropped")
        assert left == [(silent.identity, PeerLeft())]
        assert end.link.num_peers == 1


def test_a_frontend_whose_connection_is_gone_is_dropped_at_the_next_heartbeat(
    open_link: Callable[..., LinkEnd],
) -> None:
    end = open_link()
    frontend = LinkFrontend(end.port)
    frontend.hello()
    frontend.close()
    assert end.next_items(2)[-1] == (frontend.identity, PeerLeft())


def test_goodbye_of_a_frontend_is_its_end(open_link: Callable[..., LinkEnd]) -> None:
    end = open_link()
    with LinkFrontend(end.port) as frontend:
        frontend.hello()
        frontend.send(Goodbye("done"))
        assert end.next_items(2) == [(frontend.identity, PeerJoined()), (frontend.identity, PeerLeft())]
        wait_until(lambda: end.link.num_peers == 0, "it is forgotten")


def test_a_frontend_that_comes_back_under_its_name_is_welcome(open_link: Callable[..., LinkEnd]) -> None:
    end = open_link(heartbeat_interval=20.0)
    identity = new_boot_id()
    first = LinkFrontend(end.port, identity)
    first.hello()
    # The first connection is still there: as after a crash that nobody noticed yet.
    with LinkFrontend(end.port, identity) as second:
        second.hello()
        assert end.next_items(2) == [(identity, PeerJoined())] * 2
        end.link.send_outputs({identity: [RequestOutput(1, [5])]}, Load(), BlockEvents())
        assert second.receive_a(Outputs).outputs[0].token_ids == [5]
    first.close()


def test_a_frontend_that_does_not_read_is_dropped_and_no_other_waits(
    open_link: Callable[..., LinkEnd], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "MAX_BACKLOG_BYTES", 1_000_000)
    end = open_link()
    with LinkFrontend(end.port) as deaf, LinkFrontend(end.port) as good:
        deaf.socket.set(zmq.RCVHWM, 1)
        deaf.hello()
        good.hello()
        end.next_items(2)
        big = [RequestOutput(1, list(range(100_000)))]
        sent = 0
        while not (left := end.inbox.take_all(0)):
            end.link.send_outputs(
                {deaf.identity: big, good.identity: [RequestOutput(2, [sent])]}, Load(), BlockEvents()
            )
            while good.receive_a(Outputs).outputs[0].token_ids != [sent]:
                pass
            sent += 1
            assert sent < 5000
        assert left == [(deaf.identity, PeerLeft())]


def test_a_slow_frontend_gets_everything_in_order(open_link: Callable[..., LinkEnd]) -> None:
    end = open_link()
    with LinkFrontend(end.port) as slow:
        slow.hello()
        end.next_items()
        for number in range(3000):  # more than ZMQ's queues hold together
            end.link.send_outputs({slow.identity: [RequestOutput(1, [number])]}, Load(), BlockEvents())
        for number in range(3000):
            assert slow.receive_a(Outputs).outputs[0].token_ids == [number]
        assert end.inbox.take_all(0) == []


def test_a_full_inbox_stops_the_reading_and_loses_nothing(open_link: Callable[..., LinkEnd]) -> None:
    end = open_link(max_inbox_bytes=10_000, heartbeat_timeout=1.0)
    with LinkFrontend(end.port) as frontend:
        frontend.hello()
        end.next_items()
        for request_id in range(200):
            frontend.send(make_add(request_id, [5] * 1000))
        wait_until(lambda: end.inbox.is_full, "the inbox is full")
        seen: list[int] = []
        while len(seen) < 200:
            for _, message in end.inbox.take_all(1.0):
                seen.append(message.request_id)  # type: ignore[union-attr]
        assert seen == list(range(200))


def test_nobody_is_dead_because_a_full_inbox_keeps_the_engine_from_listening(
    open_link: Callable[..., LinkEnd],
) -> None:
    end = open_link(max_inbox_bytes=10_000, heartbeat_timeout=0.3)
    with LinkFrontend(end.port) as frontend, LinkFrontend(end.port) as other:
        frontend.hello()
        other.hello()
        for request_id in range(50):
            frontend.send(make_add(request_id, [5] * 1000))
        wait_until(lambda: end.inbox.is_full, "the inbox is full")
        silent_until = time.monotonic() + 0.8
        while time.monotonic() < silent_until:  # a step takes long; frontends speak, and are told of the engine's life
            other.send(Heartbeat())
            other.receive_a(Heartbeat)
            frontend.receive_a(Heartbeat)
        other.send(make_add(99, [5]))
        seen: list[object] = []
        wait_until(lambda: bool(seen.extend(end.inbox.take_all(0.1)) or len(seen) >= 53), "everything is read")
        assert not [item for item in seen if isinstance(item[1], PeerLeft)]  # type: ignore[index]
        assert end.link.num_peers == 2


def test_output_over_the_limit_ends_that_request_alone(
    open_link: Callable[..., LinkEnd], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = link_module.encode_outputs
    monkeypatch.setattr(link_module, "encode_outputs", lambda outputs: original(outputs, max_bytes=1000))
    end = open_link()
    with LinkFrontend(end.port) as frontend:
        frontend.hello()
        end.next_items()
        outputs = [RequestOutput(1, list(range(10_000))), RequestOutput(2, [5])]
        end.link.send_outputs({frontend.identity: outputs}, Load(), BlockEvents())
        results = frontend.collect([1])
        assert results[1].finish_reason is FinishReason.ERROR
        assert "fewer logprobs" in (results[1].error or "")
        assert frontend.receive_a(Outputs).outputs == [RequestOutput(2, [5])]
        assert end.next_items() == [(frontend.identity, Abort([1]))]


def test_draining_is_told_to_those_there_and_to_those_who_come(open_link: Callable[..., LinkEnd]) -> None:
    end = open_link()
    with LinkFrontend(end.port) as there, LinkFrontend(end.port) as late:
        there.hello()
        end.link.send_goodbye("update")
        assert there.receive_a(Goodbye).reason == "update"
        assert late.hello().draining


def test_a_taken_port_is_named(open_link: Callable[..., LinkEnd], tmp_path: Path) -> None:
    end = open_link()
    with pytest.raises(LinkBindError, match=f"port {end.port} on 127.0.0.1 .*--link-port"):
        open_link(link_port=end.port)


def test_a_failure_of_its_thread_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Link, "_receive", lambda *arguments: 1 / 0)
    end = LinkEnd(write_model(tmp_path / "model"))
    with LinkFrontend(end.port) as frontend:
        frontend.send(Hello(PROTOCOL_VERSION, frontend.identity))
        assert end.link.join(10)
    assert isinstance(end.ended[0], ZeroDivisionError)
    end.link.send_outputs({}, Load(), BlockEvents())


# The loop behind the link


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[tuple[EngineCore, Link]]:
    settings = make_settings(write_model(tmp_path / "model"), heartbeat_interval=0.05, simulated_step_ms=2.0)
    executor = SimulatedExecutor(settings)
    core = EngineCore(executor, settings)
    inbox: Inbox[FromPeer] = Inbox(1 << 20)
    ended: list[BaseException | None] = []
    loop = EngineLoop(core, inbox, settings, on_end=ended.append, on_step=lambda seconds: None)
    link = Link(settings, executor.description, core.limits, b"engine", inbox, lambda: True, ended.append)
    link.start(core.load())
    loop.start(link)
    yield core, link
    loop.drain()
    assert loop.join(30)
    link.stop(linger=0.1)
    assert link.join(10)
    assert ended == [None, None]


def all_free(core: EngineCore) -> bool:
    return core.num_requests == 0 and core.num_free_blocks == core.num_blocks


def test_requests_of_two_frontends_with_equal_ids(engine: tuple[EngineCore, Link]) -> None:
    core, link = engine
    with LinkFrontend(link.port) as one, LinkFrontend(link.port) as two:
        one.hello()
        two.hello()
        one.send(make_add(1, [5, 6], max_tokens=5))
        two.send(make_add(1, [7, 8], max_tokens=7))
        assert len(one.collect([1])[1].token_ids) == 5
        assert len(two.collect([1])[1].token_ids) == 7
        wait_until(lambda: all_free(core), "everything is free")


def test_an_abort_is_acted_on_and_the_rest_goes_on(engine: tuple[EngineCore, Link]) -> None:
    core, link = engine
    with LinkFrontend(link.port) as frontend:
        frontend.hello()
        frontend.send(make_add(1, [5], max_tokens=200))
        frontend.send(make_add(2, [5], max_tokens=30))
        frontend.receive_a(Outputs)
        frontend.send(Abort([1, 77]))
        assert len(frontend.collect([2])[2].token_ids) >= 28
        wait_until(lambda: all_free(core), "everything is free")
        assert core.statistics.finished["abort"] == 1


def test_an_abort_right_behind_its_add_leaves_no_work(engine: tuple[EngineCore, Link]) -> None:
    core, link = engine
    with LinkFrontend(link.port) as frontend:
        frontend.hello()
        for request_id in range(50):
            frontend.send(make_add(request_id, [5], max_tokens=200))
            frontend.send(Abort([request_id]))
        wait_until(lambda: core.statistics.finished.get("abort") == 50, "all are aborted")
        assert all_free(core)


def test_a_vanished_frontend_leaves_no_work(engine: tuple[EngineCore, Link]) -> None:
    core, link = engine
    frontend = LinkFrontend(link.port)
    frontend.hello()
    for request_id in range(5):
        frontend.send(make_add(request_id, [5], max_tokens=250))
    frontend.receive_a(Outputs)
    frontend.close()
    wait_until(lambda: all_free(core), "everything is free", timeout=5)
    assert core.statistics.finished == {"abort": 5}


def test_a_frontend_that_says_hello_again_starts_over(engine: tuple[EngineCore, Link]) -> None:
    core, link = engine
    with LinkFrontend(link.port) as frontend:
        frontend.hello()
        frontend.send(make_add(1, [5] * 9, max_tokens=250))
        frontend.receive_a(Outputs)
        frontend.hello()
        wait_until(lambda: all_free(core), "the old request is gone")
        stored: set[int] = set()
        until = time.monotonic() + 10
        while stored != set(core.stored_block_hashes()):
            assert time.monotonic() < until
            stored |= set(frontend.receive_a(Heartbeat).stored_block_hashes)
        assert len(stored) >= 2
