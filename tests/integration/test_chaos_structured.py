"""Constrained streams through the death of their engine: all valid, and what they would have been undisturbed."""

import asyncio
import json
from pathlib import Path
from typing import Any

import jsonschema
from process_fleet import ProcessFleet, wait_until
from streamed_answer import StreamedAnswer, stream

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "scores": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": 999},
            "minItems": 6,
            "maxItems": 6,
        },
        "kind": {"enum": ["red", "green"]},
        "more": {
            "type": "object",
            "properties": {"ok": {"type": "boolean"}},
            "required": ["ok"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "scores", "kind", "more"],
    "additionalProperties": False,
}
PROMPTS = ("A person in JSON:", "Some scores:", "The red team's", "{", "北京")
SETTINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1, "seed": 1},
    {"temperature": 1, "seed": 2, "top_p": 0.9},
    {"temperature": 1.3, "seed": 3, "top_k": 50, "repetition_penalty": 1.05},
)


def test_twenty_constrained_streams_survive_a_killed_engine(smollm2: Path, tmp_path: Path) -> None:
    fleet = ProcessFleet(
        tmp_path,
        smollm2,
        num_frontends=1,
        num_engines=2,
        # float32: whether two nearly equal logits change places must not depend on the batch in this test.
        engine={"executor": "torch", "dtype": "float32", "kv_cache_memory": 0.3, "threads": 1},
        # A busy machine is no dead engine.
        frontend={"heartbeat_timeout": 10},
    )
    for engine in fleet.engines:
        del engine.settings["num_kv_blocks"]
    bodies = [
        {"prompt": prompt, "max_tokens": 150, "structured_outputs": {"json": SCHEMA}, **settings}
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
            lambda: engine.metric("generated_tokens_total") > before + 40 and engine.metric("requests_running") > 0,
            "it is in the middle of its streams",
        )
        engine.kill()
        return undisturbed, await answers

    try:
        fleet.start()
        undisturbed, answers = asyncio.run(main())
        assert fleet.frontend_metric("failovers_total") > 0
        for answer, expected in zip(answers, undisturbed, strict=True):
            assert answer.complete, answer.describe()
            assert answer.finish_reasons == ["stop"]
            jsonschema.validate(json.loads(answer.text), SCHEMA)
            assert answer.text == expected.text
        fleet.assert_nothing_left(fleet.engines[1:])
    finally:
        fleet.close()
