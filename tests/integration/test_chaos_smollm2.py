"""A real model through the death of its engine: greedy and seeded streams go on exactly as they would have."""

import asyncio
from pathlib import Path
from typing import Any

from killed_engine import model_fleet, stream_through_a_kill

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
    fleet = model_fleet(tmp_path, smollm2)
    bodies = [
        {"prompt": prompt, "max_tokens": 32, "ignore_eos": True, "logprobs": 1, **settings}
        for prompt in PROMPTS
        for settings in SETTINGS
    ]

    try:
        fleet.start()
        undisturbed, answers = asyncio.run(stream_through_a_kill(fleet, bodies, 30))
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
