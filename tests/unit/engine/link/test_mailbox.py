"""The hand-overs between the two threads."""

import select
import threading

import pytest

from services.engine.mailbox import ITEM_BYTES, Inbox, Outbox


def test_the_inbox_gives_everything_in_order_and_counts_its_bytes() -> None:
    inbox: Inbox[int] = Inbox(max_bytes=3 * ITEM_BYTES + 30)
    for number in range(3):
        assert not inbox.is_full
        inbox.put(number, 10)
    assert inbox.is_full
    inbox.put(3, 10)  # a control item is taken all the same
    assert inbox.take_all(0) == [0, 1, 2, 3]
    assert not inbox.is_full
    assert inbox.take_all(0) == []


def test_small_messages_fill_the_inbox_too() -> None:
    inbox: Inbox[int] = Inbox(max_bytes=100_000)
    count = 0
    while not inbox.is_full:
        inbox.put(0, 0)
        count += 1
    assert count < 200


def test_an_idle_reader_wakes_at_once() -> None:
    inbox: Inbox[int] = Inbox(1000)
    threading.Timer(0.02, inbox.put, (7, 1)).start()
    assert inbox.take_all(timeout=30) == [7]


def test_nothing_comes_within_the_timeout() -> None:
    inbox: Inbox[int] = Inbox(1000)
    assert inbox.take_all(timeout=0.01) == []


def test_the_outbox_signals_whenever_something_is_there() -> None:
    outbox: Outbox[int] = Outbox(100)

    def is_readable() -> bool:
        return bool(select.select([outbox.descriptor], [], [], 0)[0])

    assert not is_readable()
    for number in range(50):
        outbox.put(number)
    assert is_readable()
    assert outbox.take_all() == list(range(50))
    assert not is_readable()
    outbox.put(50)
    assert is_readable()
    assert outbox.take_all() == [50]
    outbox.close()


def test_no_item_is_lost_between_two_threads() -> None:
    outbox: Outbox[int] = Outbox(1_000_000)
    writer = threading.Thread(target=lambda: [outbox.put(number) for number in range(50_000)])
    writer.start()
    taken: list[int] = []
    while len(taken) < 50_000:
        assert select.select([outbox.descriptor], [], [], 10)[0], "an item lies there and nothing tells of it"
        taken += outbox.take_all()
    writer.join()
    assert taken == list(range(50_000))
    outbox.close()


def test_an_outbox_that_nobody_empties_is_an_error() -> None:
    outbox: Outbox[int] = Outbox(3)
    for number in range(3):
        outbox.put(number)
    with pytest.raises(OverflowError, match="hangs"):
        outbox.put(3)
    outbox.close()


def test_a_closed_outbox_takes_nothing() -> None:
    outbox: Outbox[int] = Outbox(3)
    outbox.close()
    outbox.put(1)
    assert not outbox._items
