"""The link with real sockets: who is answered, who is dropped, and what each frontend is told."""

import logging
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import zmq
from engine_harness import LinkFrontend, make_add, wait_until, write_model
from link_end import LIMITS, LinkEnd

from services.engine import link as link_module
from services.engine import peers
from services.engine.kv_cache import BlockEvents
from services.engine.link import Link
from services.engine.link_items import FromPeer, PeerJoined, PeerLeft
from services.engine.router_socket import LinkBindError
from shared.protocol import (
    PROTOCOL_VERSION,
    Abort,
    FinishReason,
    Goodbye,
    Heartbeat,
    Hello,
    Load,
    Outputs,
    RequestOutput,
    encode,
    new_boot_id,
)


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
        wait_until(lambda: len(end.link.peers) == 1, "the hostile peer is dropped")


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
        assert len(end.link.peers) == 1


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
        wait_until(lambda: len(end.link.peers) == 0, "it is forgotten")


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
        assert len(end.link.peers) == 2


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
