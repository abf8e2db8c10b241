"""A reader that is slow gets less often, never less; a reader that waits is woken once."""

import asyncio
import functools

import pytest

from services.frontend.generation import GenerationError
from services.frontend.output.collector import UNMERGED, Collector, Delta
from shared.protocol import FinishReason, TokenLogprobs


def piece(number: int) -> Delta:
    return Delta(
        f"{number} ",
        token_ids=[number],
        logprobs=[TokenLogprobs(number, -1.0, 1)],
        cached_tokens=7 if number == 0 else None,
        prompt_logprobs=[TokenLogprobs(9, -2.0, 1)] if number == 0 else None,
        completion_tokens=number + 1,
    )


def merged(deltas: list[tuple[int, Delta]]) -> Delta:
    """What one choice got, as one."""
    assert {index for index, _ in deltas} == {0}
    return functools.reduce(Delta.merge, [delta for _, delta in deltas])


def test_a_few_unread_deltas_stay_apart() -> None:
    collector = Collector(1)
    pieces = [piece(number) for number in range(UNMERGED)]
    for each in pieces:
        collector.put(0, each)
    assert collector.take() == [(0, each) for each in pieces]
    assert collector.take() == []


def test_many_unread_deltas_become_few_and_nothing_is_lost() -> None:
    async def run() -> None:
        collector = Collector(1)
        for number in range(1000):
            collector.put(0, piece(number))
            assert len(collector._unread[0]) <= 2 * UNMERGED
        collector.put(0, Delta(completion_tokens=1000, finish_reason=FinishReason.STOP, stop_reason="x"))
        delta = merged(await collector.get())
        assert delta.content == "".join(f"{number} " for number in range(1000))
        assert delta.token_ids == list(range(1000))
        assert delta.logprobs is not None
        assert [entry.token_id for entry in delta.logprobs] == delta.token_ids
        assert delta.prompt_logprobs == [TokenLogprobs(9, -2.0, 1)]
        assert (delta.cached_tokens, delta.completion_tokens) == (7, 1000)
        assert (delta.finish_reason, delta.stop_reason) == (FinishReason.STOP, "x")
        assert collector.done

    asyncio.run(run())


def test_merging_leaves_the_lists_of_others_alone() -> None:
    async def run() -> None:
        theirs = [1]
        collector = Collector(1)
        for token_id in range(1, UNMERGED + 2):
            collector.put(0, Delta(token_ids=theirs if token_id == 1 else [token_id]))
        assert merged(await collector.get()).token_ids == list(range(1, UNMERGED + 2))
        assert theirs == [1]

    asyncio.run(run())


def test_choices_come_in_order_and_each_finishes_for_itself() -> None:
    async def run() -> None:
        collector = Collector(3)
        collector.put(2, Delta("c", finish_reason=FinishReason.LENGTH))
        collector.put(0, Delta("a"))
        assert [(index, delta.content) for index, delta in await collector.get()] == [(0, "a"), (2, "c")]
        assert not collector.done
        collector.put(0, Delta(finish_reason=FinishReason.STOP))
        collector.put(1, Delta(error=GenerationError("broken")))
        assert not collector.done  # finished, but not read
        ready = await collector.get()
        assert [index for index, _ in ready] == [0, 1]
        assert str(ready[1][1].error) == "broken"
        assert collector.done
        assert await collector.get() == []  # and does not wait for ever

    asyncio.run(run())


def test_a_waiting_reader_wakes_once_for_all_that_one_pass_of_the_loop_put() -> None:
    async def run() -> None:
        collector = Collector(2)
        wakes = []

        async def read() -> None:
            while not collector.done:
                wakes.append(await collector.get())

        reader = asyncio.create_task(read())
        await asyncio.sleep(0)  # it waits now
        for number in range(5):
            collector.put(0, piece(number))
            collector.put(1, piece(number))
        collector.put(0, Delta(finish_reason=FinishReason.STOP))
        collector.put(1, Delta(finish_reason=FinishReason.STOP))
        await reader
        assert len(wakes) == 1
        for choice in range(2):
            text = "".join(delta.content for index, delta in wakes[0] if index == choice)
            assert text == "0 1 2 3 4 "

    asyncio.run(run())


def test_a_reader_that_is_told_is_told_once_until_it_asks_again() -> None:
    collector = Collector(1)
    told: list[str] = []
    collector.notify(lambda: told.append("first"))
    collector.put(0, piece(0))
    collector.put(0, piece(1))
    assert told == ["first"]
    collector.notify(lambda: told.append("there is something already"))
    assert told == ["first", "there is something already"]
    collector.take()
    collector.notify(lambda: told.append("never"))
    collector.notify(None)
    collector.put(0, piece(2))
    assert len(told) == 2


def test_a_reader_that_was_cancelled_leaves_a_collector_that_works() -> None:
    async def run() -> None:
        collector = Collector(1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(collector.get(), 0.001)
        collector.put(0, Delta("a"))
        assert (await collector.get())[0][1].content == "a"

    asyncio.run(run())
