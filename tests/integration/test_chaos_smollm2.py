"""A real model through the death of its engine: greedy and seeded streams go on exactly as they would have."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from killed_engine import model_fleet, stream_through_a_kill
from process_fleet import wait_until
from streamed_answer import stream

from services.engine.model.kernels import load_kernels

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


@pytest.mark.parametrize("quantization", ["none", "int4"])
def test_greedy_and_seeded_streams_survive_a_killed_engine(smollm2: Path, tmp_path: Path, quantization: str) -> None:
    if quantization == "none":
        fleet = model_fleet(tmp_path, smollm2)
    elif load_kernels() is None:
        pytest.skip("no C compiler here; PyTorch's products in bf16 make no such promise")
    else:
        fleet = model_fleet(tmp_path, smollm2, dtype="bfloat16", quantization=quantization)
    requests = [
        ("/v1/completions", {"prompt": prompt, "max_tokens": 32, "ignore_eos": True, "logprobs": 1, **settings})
        for prompt in PROMPTS
        for settings in SETTINGS
    ]

    try:
        fleet.start()
        undisturbed, answers = asyncio.run(stream_through_a_kill(fleet, requests, 30))
        assert fleet.frontend_metric("failovers_total") > 0
        for answer, expected in zip(answers, undisturbed, strict=True):
            assert expected.complete, expected.describe()
            assert answer.complete, answer.describe()
            assert answer.text == expected.text
            assert answer.usage is not None
            assert answer.usage["completion_tokens"] == 32
        assert len({answer.text for answer in answers}) == len(requests)
        fleet.assert_nothing_left(fleet.engines[1:])
    finally:
        fleet.close()


def test_a_stream_does_not_go_on_with_weights_that_are_rounded_otherwise(smollm2: Path, tmp_path: Path) -> None:
    if load_kernels() is None:
        pytest.skip("no C compiler here; rounding takes long without")
    fleet = model_fleet(tmp_path, smollm2, dtype="bfloat16", quantization="int8")
    fleet.engines[1].settings["quantization"] = "int4"
    body = {"prompt": PROMPTS[0], "max_tokens": 1000, "temperature": 0, "ignore_eos": True}

    async def kill_in_the_middle() -> None:
        answer = asyncio.create_task(stream(frontend.port, body))
        await asyncio.to_thread(
            wait_until, lambda: any(e.metric("generated_tokens_total") > 5 for e in fleet.engines), "it has begun"
        )
        (used,) = (engine for engine in fleet.engines if engine.metric("generated_tokens_total"))
        (other,) = (engine for engine in fleet.engines if engine is not used)
        used.kill()
        broken = await answer
        assert not broken.complete, broken.describe()
        assert broken.error is not None
        assert "replaced" in broken.error["message"]
        assert other.metric("generated_tokens_total") == 0
        # The other serves what is new.
        answered = await stream(frontend.port, body | {"max_tokens": 8})
        assert answered.complete, answered.describe()
        assert other.metric("generated_tokens_total") >= 8

    try:
        for member in fleet.members:
            member.start()
        for member in fleet.members:
            wait_until(lambda member=member: member.is_up, "a process serves", timeout=120)
        (frontend,) = fleet.frontends
        wait_until(lambda: "it serves other weights" in frontend.log, "the frontend leaves one out")
        assert frontend.metric("engines_ready") == 1
        asyncio.run(kill_in_the_middle())
    finally:
        fleet.close()
