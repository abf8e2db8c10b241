"""A request's end by an error meets ends of its choices that nobody has read yet."""

import asyncio

import pytest

from services.frontend.generation import Generation, GenerationError
from services.frontend.http.choices import Choices
from services.frontend.http.whole_collector import WholeCollector
from services.frontend.output.collector import Collector, Delta
from shared.protocol import FinishReason, RequestOutput
from shared.sampling_params import SamplingParams


class Pool:
    def submit(self, generation: Generation) -> None: ...

    def abort(self, request_id: int) -> None: ...


class Sink:
    def accept(self, output: RequestOutput) -> bool:
        return False

    def fail(self, error: GenerationError) -> None: ...


def choices_of(collector: Collector, num_choices: int, timeout: float | None = None) -> Choices:
    generations = [Generation("model", [1], SamplingParams(), Sink()) for _ in range(num_choices)]
    return Choices(Pool(), generations, collector, timeout)


@pytest.mark.parametrize("make", [Collector, WholeCollector])
@pytest.mark.parametrize("order", ["engine first", "frontend first"])
def test_both_sides_notice_the_deadline_at_once(make: type[Collector], order: str) -> None:
    async def main() -> None:
        collector = make(1)
        choices = choices_of(collector, 1, timeout=5)
        choices.submit()
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
