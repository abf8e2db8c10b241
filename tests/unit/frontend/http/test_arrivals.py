"""Requests that come at once are begun a few a turn, in order, and others of the loop's callbacks run in between."""

import asyncio
from collections import Counter

from services.frontend.http.arrivals import PER_TURN, Arrivals


def test_few_do_not_wait() -> None:
    async def main() -> None:
        arrivals = Arrivals()
        for _ in range(3):
            for _ in range(PER_TURN):
                taking = arrivals.take_turn()
                try:
                    taking.send(None)
                except StopIteration:
                    continue
                raise AssertionError("it waited")
            await asyncio.sleep(0)

    asyncio.run(main())


def test_many_are_begun_in_order_and_a_few_a_turn() -> None:
    begun: list[int] = []
    in_turn: Counter[int] = Counter()
    turn = 0

    async def request(arrivals: Arrivals, number: int) -> None:
        await arrivals.take_turn()
        begun.append(number)
        in_turn[turn] += 1

    async def main() -> None:
        nonlocal turn
        arrivals = Arrivals()
        requests = [asyncio.ensure_future(request(arrivals, number)) for number in range(10 * PER_TURN)]
        requests[5].cancel()
        while not all(each.done() for each in requests):
            await asyncio.sleep(0)
            turn += 1

    asyncio.run(main())
    assert begun == [number for number in range(10 * PER_TURN) if number != 5]
    assert max(in_turn.values()) <= PER_TURN
    assert len(in_turn) >= 9


def test_one_that_left_while_it_waited_takes_nobodys_turn() -> None:
    async def main() -> None:
        arrivals = Arrivals()
        waiting = [asyncio.ensure_future(arrivals.take_turn()) for _ in range(3 * PER_TURN)]
        await asyncio.sleep(0)
        for each in waiting[PER_TURN : 2 * PER_TURN]:
            each.cancel()
        async with asyncio.timeout(60):
            await asyncio.gather(*waiting, return_exceptions=True)
        assert [each.cancelled() for each in waiting] == [False] * PER_TURN + [True] * PER_TURN + [False] * PER_TURN

    asyncio.run(main())
