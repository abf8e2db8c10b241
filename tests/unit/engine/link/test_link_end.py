"""The link's end: nothing that was sent is lost with a connection, nothing that comes late is left unanswered."""

import time
from collections.abc import Callable

from engine_harness import LinkFrontend, make_add, wait_until
from link_end import LinkEnd

from services.engine.kv_cache import BlockEvents
from shared.protocol import Abort, FinishReason, Goodbye, Heartbeat, Load, Outputs, RequestOutput

HANDED_OVER = RequestOutput(1, finish_reason=FinishReason.HANDED_OVER)


def test_the_last_outputs_reach_a_frontend_that_reads_late(open_link: Callable[..., LinkEnd]) -> None:
    """A DEALER with ZMQ_IMMEDIATE drops what it has received but not handed on when its connection closes."""
    end = open_link()
    with LinkFrontend(end.port, immediate=True) as frontend:
        frontend.hello()
        frontend.receive_a(Heartbeat)
        while frontend.socket.poll(0):
            frontend.receive()
        end.link.send_goodbye("update")
        end.link.send_outputs({frontend.identity: [HANDED_OVER]}, Load(), BlockEvents())
        end.link.stop(linger=30)
        # Long enough for the engine to close, did it not wait.
        assert not end.link.join(0.3)
        assert frontend.receive_a(Outputs).outputs == [HANDED_OVER]
        frontend.send(Goodbye("nothing is left"))
        assert end.link.join(10)


def test_it_waits_for_every_frontend_and_for_none_that_is_gone(open_link: Callable[..., LinkEnd]) -> None:
    end = open_link()
    gone = LinkFrontend(end.port)
    gone.hello()
    with LinkFrontend(end.port) as one, LinkFrontend(end.port) as two:
        one.hello()
        two.hello()
        end.link.stop(linger=30)
        one.send(Goodbye())
        gone.close()
        assert not end.link.join(0.2)
        two.send(Goodbye())
        assert end.link.join(10)


def test_one_that_never_says_goodbye_does_not_hold_it_up_for_ever(open_link: Callable[..., LinkEnd]) -> None:
    end = open_link(heartbeat_interval=60.0)
    with LinkFrontend(end.port) as frontend:
        frontend.hello()
        began = time.monotonic()
        end.link.stop(linger=0.3)
        assert end.link.join(10)
        assert time.monotonic() - began >= 0.3


def test_requests_that_nobody_takes_any_more_are_handed_over(open_link: Callable[..., LinkEnd]) -> None:
    end = open_link()
    with LinkFrontend(end.port) as frontend:
        frontend.hello()
        # One reaches the inbox when the loop no longer reads it, another comes later still.
        frontend.send(make_add(1, [5]))
        frontend.send(Abort([7]))
        wait_until(lambda: len(end.inbox._items) == 3, "all came")
        end.link.stop(linger=30)
        assert frontend.receive_a(Outputs).outputs == [HANDED_OVER]
        frontend.send(make_add(2, [5]))
        assert frontend.receive_a(Outputs).outputs[0].request_id == 2
        frontend.send(Goodbye())
        assert end.link.join(10)


def test_after_a_failure_it_waits_for_nobody(open_link: Callable[..., LinkEnd]) -> None:
    end = open_link()
    with LinkFrontend(end.port) as frontend:
        frontend.hello()
        end.link.stop(linger=0.0)
        assert end.link.join(10)
