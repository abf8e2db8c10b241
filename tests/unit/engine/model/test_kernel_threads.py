"""The threads of the CPU kernels: every item once, one phase after another, and none waits for one that is held."""

import ctypes
import threading
from collections.abc import Sequence

import pytest

from services.engine.model.kernels import load_kernels

ITEMS = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64)
RUN = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)


class Program(ctypes.Structure):
    """team.h's."""

    _fields_ = (("work", ctypes.c_void_p), ("phases", ctypes.c_int64), ("items", ITEMS), ("run", RUN))


class Recorded:
    """A program whose phases have so many items, and what was run of it: (phase, item, thread)."""

    def __init__(self, items: Sequence[int]) -> None:
        self.asked: list[int] = []
        self.begun: list[tuple[int, int, int]] = []
        self.ended: list[tuple[int, int]] = []
        self.overlaps: list[tuple[int, int]] = []
        self._items = items
        self._program = Program(None, len(items), ITEMS(self._count), RUN(self._record))

    def run(self, threads: int) -> None:
        kernels = load_kernels()
        if kernels is None:
            pytest.skip("no C compiler here")
        kernels.long.run_program.argtypes = [ctypes.POINTER(Program), ctypes.c_int64]
        kernels.long.run_program(self._program, threads)

    def during(self, phase: int, item: int) -> None:
        """For what an item shall do."""

    def _count(self, work: int, phase: int) -> int:
        self.asked.append(phase)
        if len(self.ended) != sum(self._items[:phase]):
            self.overlaps.append((phase, len(self.ended)))
        return self._items[phase]

    def _record(self, work: int, phase: int, item: int) -> None:
        self.begun.append((phase, item, threading.get_ident()))
        self.during(phase, item)
        self.ended.append((phase, item))


@pytest.mark.parametrize("threads", [0, 1, 2, 3, 9])
def test_every_item_runs_once_and_phases_follow_each_other(threads: int) -> None:
    items = [0, 1, 2, 7, 0, 100, 1, 1, 3, 64, 0]
    program = Recorded(items)
    program.run(threads)
    assert program.asked == list(range(len(items)))
    assert sorted(program.ended) == [(phase, item) for phase, count in enumerate(items) for item in range(count)]
    assert program.overlaps == []


def test_a_program_without_items_ends() -> None:
    program = Recorded([0, 0])
    program.run(4)
    assert program.asked == [0, 1]


class Held(Recorded):
    """The first item that each of some threads takes waits until all others are done."""

    def __init__(self, items: int, held: int) -> None:
        super().__init__([items])
        self.timed_out = False
        self._others = items - held
        self._may_hold = held
        self._held: set[int] = set()
        self._lock = threading.Lock()
        self._all_others_done = threading.Event()

    def during(self, phase: int, item: int) -> None:
        thread = threading.get_ident()
        with self._lock:
            holds = len(self._held) < self._may_hold and thread not in self._held
            if holds:
                self._held.add(thread)
            else:
                self._others -= 1
                if self._others == 0:
                    self._all_others_done.set()
        if holds:
            self.timed_out |= not self._all_others_done.wait(60)


@pytest.mark.parametrize("threads", [2, 4])
def test_what_a_held_thread_leaves_of_its_share_is_taken_by_others(threads: int) -> None:
    program = Held(40, held=threads - 1)
    program.run(threads)
    assert not program.timed_out
    assert sorted(item for _, item in program.ended) == list(range(40))
    assert len({thread for _, _, thread in program.begun}) >= threads


def test_programs_of_several_callers_run_one_after_another() -> None:
    programs = [Recorded([3, 50, 1, 20]) for _ in range(6)]
    callers = [threading.Thread(target=program.run, args=(1 + n % 3,)) for n, program in enumerate(programs)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(60)
        assert not caller.is_alive()
    for program in programs:
        assert sorted(program.ended) == [(p, i) for p, count in enumerate([3, 50, 1, 20]) for i in range(count)]
        assert program.overlaps == []
