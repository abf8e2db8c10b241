import os
import platform
import sys
import threading
from collections.abc import Callable

import pytest

from services.frontend.thread_priority import SLICE_NANOSECONDS, run_soon, slice_nanoseconds

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="threads have a policy of their own on Linux alone")


def in_thread(work: Callable[[], object]) -> None:
    """Run it in a thread of its own, whose priority ends with it. Raises what it raises."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]


def test_the_thread_that_asks_runs_soon_and_those_that_it_starts_as_before() -> None:
    slices: list[int] = []

    def look() -> None:
        slices.append(slice_nanoseconds())

    def check() -> None:
        taken = run_soon()
        assert slice_nanoseconds() == (SLICE_NANOSECONDS if taken else slices[0])
        in_thread(look)

    in_thread(look)
    in_thread(check)
    usual, inherited = slices
    assert inherited == usual


@on_linux
def test_a_thread_stays_as_nice_as_it_was() -> None:
    def check() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 3 + os.getpriority(os.PRIO_PROCESS, 0))
        nice = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        run_soon()
        assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == nice

    in_thread(check)


@on_linux
def test_another_policy_is_left_alone() -> None:
    def check() -> None:
        try:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        except OSError:
            return  # not every sandbox has it
        assert not run_soon()
        assert os.sched_getscheduler(0) == os.SCHED_BATCH

    in_thread(check)


def test_where_the_system_calls_are_not_known_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = slice_nanoseconds()
    with monkeypatch.context() as patch:
        patch.setattr(platform, "machine", lambda: "abacus")
        assert not run_soon()
        assert slice_nanoseconds() == 0
    assert slice_nanoseconds() == usual
