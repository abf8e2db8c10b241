"""A real model through the death of its engine: greedy and seeded streams go on exactly as they would have."""

import asyncio
from pathlib import Path
from typing import Any

from process_fleet import ProcessFleet, wait_until
from streamed_answer import StreamedAnswer, stream

PROMPTS = (
    "Once upon a time, in a village by the sea,",
    "The three primary colours are",
    "def fibonacci(n):\n",
    "北京是",
)
SETTINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.9, "top_p": 0.95, "seed": 11},
    {"temperature": 1.2, "top_k": 40, "seed": 12, "repetition_penalty": 1.1, "presence_penalty": 0.5},
)


def test_greedy_and_seeded_streams_survive_a_killed_engine(smollm2: Path, tmp_path: Path) -> None:
    # float32: whether two nearly equal logits change places must not depend on the batch in this test.
    torch = {"executor": "torch", "dtype": "float32", "kv_cache_memory": 0.3, "threads": 1}
    fleet = ProcessFleet(
        tmp_path,
        smollm2,
        num_frontends=1,
        num_engines=2,
        engine=torch,
        # A busy machine is no dead engine.
        frontend={"heartbeat_timeout": 10},
    )
    for engine in fleet.engines:
        del engine.settings["num_kv_blocks"]
    bodies = [
        {"prompt": prompt, "max_tokens": 32, "ignore_eos": True, "logprobs": 1, **settings}
        for prompt in PROMPTS
        for settings in SETTINGS
    ]

    async def main() -> tuple[list[StreamedAnswer], list[StreamedAnswer]]:
        port = fleet.frontends[0].port
        undisturbed = await asyncio.gather(*(stream(port, body) for body in bodies))
        engine = fleet.engines[0]
        before = engine.metric("generated_tokens_total")
        answers = asyncio.gather(*(stream(port, body) for body in bodies))
        await asyncio.to_thread(
            wait_until,
            lambda: engine.metric("generated_tokens_total") > before + 30 and engine.metric("requests_running") > 0,
            "it is in the middle of its streams",
        )
        engine.kill()
        return undisturbed, await answers

    try:
        fleet.start()
        undisturbed, answers = asyncio.run(main())
        assert fleet.frontend_metric("failovers_total") > 0
        for answer, expected in zip(answers, undisturbed, strict=True):
            assert expected.complete, expected.describe()
            assert answer.complete, answer.describe()
            assert answer.text == expected.text
            assert answer.usage is not None
            assert answer.usage["completion_tokens"] == 32
        assert len({answer.text for answer in answers}) == len(bodies)
        fleet.assert_nothing_left(fleet.engines[1:])
    finally:
        fleet.close()
