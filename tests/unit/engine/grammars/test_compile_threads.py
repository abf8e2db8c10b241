"""The order in which threads take what there is to compile."""

import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError

import pytest

from services.engine.grammars import compile_threads as module
from services.engine.grammars.compile_threads import CompileThreads
from shared.grammar_turns import CHARACTERS_PER_SECOND


class Held:
    """One thread, held up until `release`; `begun` are the names of the work that it has begun with since."""

    def __init__(self) -> None:
        self.threads = CompileThreads(1)
        self.release = threading.Event()
        self.begun: list[str] = []
        busy = threading.Event()
        self.threads.submit(0, lambda: (busy.set(), self.release.wait(60)))
        assert busy.wait(60)

    def submit(self, name: str, characters: int = 0):
        return self.threads.submit(characters, lambda: self.begun.append(name))


@pytest.fixture
def held() -> Iterator[Held]:
    held = Held()
    yield held
    held.release.set()
    held.threads.close()


def test_large_ones_are_passed_for_a_while_only(held: Held, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    work = [held.submit("large", 2 * CHARACTERS_PER_SECOND)]
    for now in (1.9, 2.1):
        work += [held.submit(f"{which} after {now} s") for which in ("small", "another")]
    monkeypatch.undo()
    held.release.set()
    for made in work:
        made.result(timeout=60)
    assert held.begun == [
        "small after 1.9 s",
        "another after 1.9 s",
        "large",
        "small after 2.1 s",
        "another after 2.1 s",
    ]


def test_what_is_cancelled_takes_no_turn_and_an_error_is_its_own(held: Held) -> None:
    def fail() -> None:
        raise ValueError("no grammar")

    failing = held.threads.submit(0, fail)
    abandoned, last = held.submit("abandoned"), held.submit("last")
    assert abandoned.cancel()
    held.release.set()
    last.result(timeout=60)
    assert held.begun == ["last"]
    with pytest.raises(ValueError, match="no grammar"):
        failing.result(timeout=60)


def test_closed_it_cancels_what_waits(held: Held) -> None:
    waiting = [held.submit(str(number)) for number in range(5)]
    held.threads.close()
    assert all(made.cancelled() for made in waiting)
    with pytest.raises(CancelledError):
        waiting[0].result(timeout=60)
    held.release.set()
    with pytest.raises(RuntimeError):
        held.submit("late")
    assert held.begun == []
