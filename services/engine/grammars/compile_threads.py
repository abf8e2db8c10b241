"""The threads that compile grammars: small ones pass large ones, as in the frontend's check, and none starves."""

import heapq
import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from shared.grammar_turns import turn_of

Result = TypeVar("Result")
_Place = tuple[float, int, "Future[Any]", Callable[[], Any]]


class CompileThreads:
    """They start with the first piece of work. Futures may be cancelled until a thread has begun with theirs."""

    def __init__(self, num_threads: int) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="grammar")
        self._numbers = itertools.count()
        self._waiting: list[_Place] = []  # a heap
        self._lock = threading.Lock()

    def submit(self, characters: int, work: Callable[[], Result]) -> "Future[Result]":
        """`characters`: how large the grammar is that `work` is about."""
        made: Future[Result] = Future()
        with self._lock:
            self._pool.submit(self._run_next)  # first: closed, it takes no more
            heapq.heappush(self._waiting, (turn_of(time.monotonic(), characters), next(self._numbers), made, work))
        return made

    def close(self) -> None:
        """Begin with nothing more; what waits is cancelled."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for _, _, made, _ in waiting:
            made.cancel()

    def _run_next(self) -> None:
        """There is one call of this for each that waits."""
        with self._lock:
            if not self._waiting:
                return  # closed meanwhile
            _, _, made, work = heapq.heappop(self._waiting)
        if not made.set_running_or_notify_cancel():
            return
        try:
            made.set_result(work())
        except BaseException as error:
            made.set_exception(error)
