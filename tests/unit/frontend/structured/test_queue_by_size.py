"""Turns of grammars that wait for a process: small ones first, bounded, and none lost where clients leave."""

import asyncio

import pytest

from services.frontend.structured import queue_by_size as queue_module
from services.frontend.structured.queue_by_size import QueueBySize, TooManyWait
from shared.grammar_turns import CHARACTERS_PER_SECOND


class Queue:
    """One turn at a time, held until `serve`; `served` are the names of those that had theirs, in order."""

    def __init__(self) -> None:
        self.queue = QueueBySize(1)
        self.served: list[str] = []
        self._step = asyncio.Semaphore(0)

    async def _take(self, name: str, characters: int) -> None:
        async with self.queue.turn(characters):
            self.served.append(name)
            await self._step.acquire()

    async def come(self, name: str, characters: int = 0) -> "asyncio.Task[None]":
        task = asyncio.create_task(self._take(name, characters))
        await asyncio.sleep(0)
        return task

    async def serve(self, *tasks: "asyncio.Task[None]") -> None:
        for _ in tasks:
            self._step.release()
        await asyncio.gather(*tasks)


def test_small_ones_pass_large_ones_and_equals_keep_their_order() -> None:
    async def run() -> list[str]:
        queue = Queue()
        large = 3600 * CHARACTERS_PER_SECOND
        sizes = {"first": large, "large": large, "small": 100, "larger": 2 * large, "second small": 100}
        await queue.serve(*[await queue.come(name, characters) for name, characters in sizes.items()])
        return queue.served

    assert asyncio.run(run()) == ["first", "small", "second small", "large", "larger"]


def test_large_ones_are_passed_for_a_while_only(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> list[str]:
        now = 0.0
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now)
        queue = Queue()
        tasks = [await queue.come("first"), await queue.come("large", 2 * CHARACTERS_PER_SECOND)]
        for now in (1.9, 2.1):
            tasks.append(await queue.come(f"small after {now} s"))
        await queue.serve(*tasks)
        return queue.served

    assert asyncio.run(run()) == ["first", "small after 1.9 s", "large", "small after 2.1 s"]


def test_the_last_is_refused_where_too_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_module, "MAX_WAITING", 2)

    async def run() -> list[str]:
        queue = Queue()
        large = 3600 * CHARACTERS_PER_SECOND
        tasks = [await queue.come("first"), await queue.come("large", large), await queue.come("small")]
        larger = await queue.come("larger", 2 * large)
        with pytest.raises(TooManyWait):
            await larger
        tasks.append(await queue.come("another small"))
        with pytest.raises(TooManyWait):
            await tasks.pop(1)
        await queue.serve(*tasks)
        return queue.served

    assert asyncio.run(run()) == ["first", "small", "another small"]


def test_who_leaves_takes_no_turn_along() -> None:
    async def run() -> list[str]:
        queue = Queue()
        first, second, third = [await queue.come(name) for name in ("first", "second", "third")]
        second.cancel()  # while it waits
        await queue.serve(first)
        fourth = await queue.come("fourth")
        third.cancel()  # while it has its turn
        await asyncio.wait([second, third])
        fifth, sixth = await queue.come("fifth"), await queue.come("sixth")
        queue._step.release()
        await fourth
        sixth.cancel()
        fifth.cancel()  # just as its turn has come
        await asyncio.wait([fifth, sixth])
        last = await queue.come("last")
        await queue.serve(last)
        return queue.served

    served = asyncio.run(run())
    assert served[:3] == ["first", "third", "fourth"]
    assert served[-1] == "last"
