"""What a client is told besides its text stays right when its engine is killed: usage, logprobs, stops, reasoning.

The engines echo, so that stop strings and think tags come where the prompt has them; and a prompt that begins with
POISON kills them.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from process_fleet import Engine, ProcessFleet, wait_until
from streamed_answer import StreamedAnswer, stream

POISON = 4242
POISON_TOKENS = 8  # after so many of its tokens
CHAT = "/v1/chat/completions"
PATCH = f"""
import os, signal
from services.engine.executor.simulated import SimulatedExecutor
execute = SimulatedExecutor.execute
def execute_or_die(self, step):
    for scheduled in step.scheduled:
        request = scheduled.request
        if request.token_ids[0] == {POISON} and request.num_output_tokens >= {POISON_TOKENS}:
            os.kill(os.getpid(), signal.SIGKILL)
    return execute(self, step)
SimulatedExecutor.execute = execute_or_die
"""
LONG_TEXT = " ".join(["one river two mountains three windows four markets five gardens six letters seven bridges"] * 6)


@pytest.fixture(scope="module")
def fleet(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessFleet]:
    fleet = ProcessFleet(
        tmp_path_factory.mktemp("fleet"),
        smollm2,
        num_frontends=2,
        num_engines=3,
        engine={"simulated_tokens": "echo"},
        frontend={"reasoning_parser": "deepseek_r1"},
    )
    for engine in fleet.engines:
        engine.patch = PATCH
    try:
        fleet.start()
        yield fleet
        fleet.assert_nothing_left()
    finally:
        fleet.close()


def ask(fleet: ProcessFleet, *requests: tuple[str, dict[str, Any]]) -> list[StreamedAnswer]:
    async def main() -> list[StreamedAnswer]:
        port = fleet.frontends[0].port
        return await asyncio.gather(*(stream(port, body, path) for path, body in requests))

    return asyncio.run(main())


def ask_while_two_of_three_engines_die(
    fleet: ProcessFleet, *requests: tuple[str, dict[str, Any]]
) -> list[StreamedAnswer]:
    async def main() -> list[StreamedAnswer]:
        port = fleet.frontends[0].port
        answers = [asyncio.create_task(stream(port, body, path)) for path, body in requests]
        for engine in fleet.engines[:2]:
            tokens = engine.metric("generated_tokens_total")
            await asyncio.to_thread(
                wait_until,
                lambda engine=engine, tokens=tokens: engine.metric("generated_tokens_total") > tokens + 50,
                "it is in the middle of its streams",
            )
            engine.kill()
        return await asyncio.gather(*answers)

    failovers = fleet.frontend_metric("failovers_total")
    answers = asyncio.run(main())
    assert fleet.frontend_metric("failovers_total") >= failovers + 2
    bring_back(fleet)
    return answers


def bring_back(fleet: ProcessFleet) -> None:
    for engine in fleet.engines:
        if not engine.is_running:
            engine.start()
    for engine in fleet.engines:
        wait_until(lambda engine=engine: engine.is_up, "every engine is back")
    fleet.wait_connected()


def test_usage_logprobs_stops_and_reasoning_are_as_undisturbed(fleet: ProcessFleet) -> None:
    thinking = f"{LONG_TEXT} hm</think>{LONG_TEXT} done"
    # The template has an eos at the end of each message.
    chat = {"messages": [{"role": "user", "content": thinking}], "max_tokens": 260, "ignore_eos": True}
    requests: list[tuple[str, dict[str, Any]]] = [
        ("/v1/completions", {"prompt": LONG_TEXT, "max_tokens": 1000}),
        ("/v1/completions", {"prompt": LONG_TEXT, "max_tokens": 70, "logprobs": 3, "return_token_ids": True}),
        ("/v1/completions", {"prompt": f"{LONG_TEXT} a needle, in hay", "max_tokens": 1000, "stop": ["needle, in"]}),
        ("/v1/completions", {"prompt": f"{LONG_TEXT} 你好，世界 👩‍👩‍👧 end", "max_tokens": 1000}),
        (CHAT, chat),
        (CHAT, {**chat, "logprobs": True, "top_logprobs": 2, "stop": ["letters seven bridges done"]}),
    ]
    requests *= 3  # so that each engine has some of them
    undisturbed = ask(fleet, *requests)
    assert all(answer.complete for answer in undisturbed), [answer.describe() for answer in undisturbed]
    assert undisturbed[0].text == LONG_TEXT
    assert undisturbed[2].text == f"{LONG_TEXT} a "
    assert undisturbed[3].text.endswith("你好，世界 👩‍👩‍👧 end")
    assert undisturbed[4].reasoning.endswith("hm")
    assert undisturbed[4].text.startswith(LONG_TEXT)
    assert undisturbed[5].text.endswith("five gardens six ")

    answers = ask_while_two_of_three_engines_die(fleet, *requests)
    for answer, expected in zip(answers, undisturbed, strict=True):
        assert answer.complete, answer.describe()
        assert answer.text == expected.text
        assert answer.reasoning == expected.reasoning
        assert answer.token_ids == expected.token_ids
        assert answer.finish_reasons == expected.finish_reasons
        assert logprobs(answer) == logprobs(expected)
        assert answer.usage is not None
        assert expected.usage is not None
        # What was cached is each run's own.
        assert {**answer.usage, "prompt_tokens_details": None} == {**expected.usage, "prompt_tokens_details": None}
    assert len(logprobs(answers[1])) == 70


def logprobs(answer: StreamedAnswer) -> list[Any]:
    """Every token's, of either route; offsets too."""
    found: list[Any] = []
    for choice in answer.choices():
        of_choice = choice.get("logprobs") or {}
        if "content" in of_choice:
            found += of_choice["content"]
        elif of_choice:
            found += zip(*(of_choice[name] for name in sorted(of_choice)), strict=True)
    return found


def test_a_poisoned_request_ends_with_an_error_and_the_others_go_on(fleet: ProcessFleet) -> None:
    others = [
        ("/v1/completions", {"prompt": [100 + number, *range(500, 640)], "max_tokens": 140}) for number in range(24)
    ]
    poisoned = ("/v1/completions", {"prompt": [POISON, *range(700, 760)], "max_tokens": 60})
    expected = ask(fleet, *others)

    async def main() -> list[StreamedAnswer]:
        port = fleet.frontends[0].port
        answers = asyncio.gather(*(stream(port, body, path) for path, body in [poisoned, *others]))
        while not answers.done():
            for engine in fleet.engines:
                if not engine.is_running:
                    engine.start()
            await asyncio.sleep(0.02)
        return answers.result()

    given_up = fleet.frontend_metric("given_up_total")
    poisoned_answer, *answers = asyncio.run(main())
    bring_back(fleet)
    assert poisoned_answer.status == 200
    assert poisoned_answer.done
    assert poisoned_answer.finish_reasons == ["error"]
    assert poisoned_answer.error is not None
    assert "3 engines died under this request" in poisoned_answer.error["message"]
    for answer, undisturbed in zip(answers, expected, strict=True):
        assert answer.complete, answer.describe()
        assert answer.text == undisturbed.text
    assert fleet.frontend_metric("given_up_total") == given_up + 1
    # Sent again it kills nothing more, whichever frontend gets it.
    processes = [engine.process for engine in fleet.engines]

    async def again() -> list[StreamedAnswer]:
        return [await stream(frontend.port, poisoned[1]) for frontend in fleet.frontends]

    same, other = asyncio.run(again())
    assert same.status == 400
    assert "under this very prompt" in same.raw.decode()
    assert not other.complete
    assert sum(engine.metric("requests_refused_total") for engine in fleet.engines) > 0
    assert [engine.process for engine in fleet.engines if engine.is_running] == processes


def test_past_max_failovers_there_is_an_error_chunk_and_done(fleet: ProcessFleet) -> None:
    async def main() -> StreamedAnswer:
        body = {"prompt": [5, *range(1000, 1400)], "max_tokens": 400}
        tokens_before = {engine: engine.metric("generated_tokens_total") for engine in fleet.engines}
        answer = asyncio.create_task(stream(fleet.frontends[0].port, body))
        for _ in range(3):
            engine = await asyncio.to_thread(engine_that_streams, fleet, tokens_before)
            engine.kill()
        return await answer

    answer = asyncio.run(main())
    assert (answer.status, answer.done, answer.finish_reasons) == (200, True, ["error"])
    assert answer.error is not None
    assert answer.error["type"] == "server_error"
    bring_back(fleet)


def engine_that_streams(fleet: ProcessFleet, tokens_before: dict[Engine, float]) -> Engine:
    found: list[Engine] = []

    def look() -> bool:
        found[:] = [
            engine
            for engine in fleet.engines
            if engine.is_running
            and engine.metric("requests_running") > 0
            and engine.metric("generated_tokens_total") > tokens_before[engine] + 5
        ]
        return bool(found)

    wait_until(look, "an engine is in the middle of the stream")
    return found[0]
