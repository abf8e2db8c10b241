"""All choices of a request: sent in parts, all or none; an error meets ends of choices that nobody has read yet."""

import asyncio

import pytest

from services.frontend.generation import Generation, GenerationError
from services.frontend.http import choices as choices_module
from services.frontend.http.choices import Choices
from services.frontend.http.whole_collector import WholeCollector
from services.frontend.output.collector import Collector, Delta
from shared.protocol import FinishReason, RequestOutput
from shared.sampling_params import SamplingParams


class Pool:
    def __init__(self, refuse_after: int | None = None) -> None:
        self.submitted: list[int] = []
        self.aborted: list[int] = []
        self._refuse_after = refuse_after

    def submit(self, generation: Generation) -> None:
        if len(self.submitted) == self._refuse_after:
            raise GenerationError("full", 429)
        self.submitted.append(generation.request_id)

    def abort(self, request_id: int) -> None:
        self.aborted.append(request_id)


class Sink:
    def accept(self, output: RequestOutput) -> bool:
        return False

    def fail(self, error: GenerationError) -> None: ...


def choices_of(
    collector: Collector, num_choices: int, timeout: float | None = None, pool: Pool | None = None
) -> Choices:
    generations = [Generation("model", [1], SamplingParams(), Sink()) for _ in range(num_choices)]
    return Choices(pool or Pool(), generations, collector, timeout)


@pytest.mark.parametrize("make", [Collector, WholeCollector])
@pytest.mark.parametrize("order", ["engine first", "frontend first"])
def test_both_sides_notice_the_deadline_at_once(make: type[Collector], order: str) -> None:
    async def main() -> None:
        collector = make(1)
        choices = choices_of(collector, 1, timeout=5)
        await choices.submit()
        ends = [
            lambda: collector.put(0, Delta("text", token_ids=[1], finish_reason=FinishReason.ABORT)),
            lambda: choices.fail(GenerationError("too late", 504)),
        ]
        for end in ends if order == "engine first" else ends[::-1]:
            end()
        deltas = await choices.next()
        assert choices.error is not None
        assert choices.error.status == 504
        assert [delta.finish_reason for _, delta in deltas] == [None]
        choices.close()

    asyncio.run(main())


@pytest.mark.parametrize("make", [Collector, WholeCollector])
def test_an_error_reaches_the_reader_though_the_first_choice_has_finished(make: type[Collector]) -> None:
    async def main() -> None:
        collector = make(2)
        choices = choices_of(collector, 2)
        collector.put(0, Delta("whole", finish_reason=FinishReason.STOP))
        choices.fail(GenerationError("too late", 504))
        deltas = dict(await asyncio.wait_for(choices.next(), 5))
        assert deltas[0].finish_reason is FinishReason.STOP
        assert deltas[0].error is None
        assert choices.error is not None

    asyncio.run(main())


@pytest.mark.parametrize("make", [Collector, WholeCollector])
def test_an_error_after_the_last_end_changes_nothing(make: type[Collector]) -> None:
    async def main() -> None:
        collector = make(1)
        choices = choices_of(collector, 1)
        collector.put(0, Delta("whole", finish_reason=FinishReason.STOP))
        choices.fail(GenerationError("too late", 504))
        assert [delta.content for _, delta in await choices.next()] == ["whole"]
        assert choices.error is None
        assert choices.done

    asyncio.run(main())


def test_many_choices_are_sent_in_parts_between_which_others_have_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices_module, "PART_SECONDS", 0.0)

    async def main() -> None:
        pool = Pool()
        seen: list[int] = []

        async def other() -> None:
            while len(pool.submitted) < 50:
                seen.append(len(pool.submitted))
                await asyncio.sleep(0)

        task = asyncio.create_task(other())
        await choices_of(Collector(50), 50, pool=pool).submit()
        await task
        assert seen == list(range(1, 50))

    asyncio.run(main())


@pytest.mark.parametrize("part", [0.0, 1.0])
def test_all_are_sent_or_none(monkeypatch: pytest.MonkeyPatch, part: float) -> None:
    monkeypatch.setattr(choices_module, "PART_SECONDS", part)

    async def main() -> None:
        pool = Pool(refuse_after=3)
        with pytest.raises(GenerationError):
            await choices_of(Collector(5), 5, pool=pool).submit()
        assert len(pool.submitted) == 3
        assert pool.aborted == pool.submitted

    asyncio.run(main())


def test_one_that_is_given_up_while_it_is_sent_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choices_module, "PART_SECONDS", 0.0)

    async def main() -> None:
        pool = Pool()
        task = asyncio.create_task(choices_of(Collector(50), 50, pool=pool).submit())
        while len(pool.submitted) < 10:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert 10 <= len(pool.submitted) < 50
        assert pool.aborted == pool.submitted

    asyncio.run(main())
