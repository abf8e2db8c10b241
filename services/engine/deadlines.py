"""Requests that must end at a given time, the soonest first."""

import heapq
import itertools

from services.engine.request import Request, RequestStatus


class Deadlines:
    """Asking costs nothing while none is due. Finished requests are forgotten before they are the most of it."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []
        self._counter = itertools.count()
        self._compact_at = 64

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, request: Request) -> None:
        """Watch a request, if it has a deadline."""
        if request.deadline is None:
            return
        heapq.heappush(self._heap, (request.deadline, next(self._counter), request))
        if len(self._heap) > self._compact_at:
            self._heap = [entry for entry in self._heap if entry[2].status is not RequestStatus.FINISHED]
            heapq.heapify(self._heap)
            self._compact_at = max(64, 2 * len(self._heap))

    def any_due(self, now: float) -> bool:
        """Whether `take_due` might give any. `now` in Unix seconds."""
        return bool(self._heap) and self._heap[0][0] <= now

    def take_due(self, now: float) -> list[Request]:
        """Unfinished requests whose time is over, each once. `now` in Unix seconds."""
        due: list[Request] = []
        heap = self._heap
        while heap and heap[0][0] <= now:
            request = heapq.heappop(heap)[2]
            if request.status is not RequestStatus.FINISHED:
                due.append(request)
        return due
