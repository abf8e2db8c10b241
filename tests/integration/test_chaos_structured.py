"""Constrained streams through the death of their engine: all valid, and what they would have been undisturbed."""

import asyncio
import json
from pathlib import Path
from typing import Any

import jsonschema
from killed_engine import model_fleet, stream_through_a_kill

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
    fleet = model_fleet(tmp_path, smollm2)
    bodies = [
        {"prompt": prompt, "max_tokens": 150, "structured_outputs": {"json": SCHEMA}, **settings}
        for prompt in PROMPTS
        for settings in SETTINGS
    ]

    try:
        fleet.start()
        undisturbed, answers = asyncio.run(stream_through_a_kill(fleet, bodies, 40))
        assert fleet.frontend_metric("failovers_total") > 0
        for answer, expected in zip(answers, undisturbed, strict=True):
            assert answer.complete, answer.describe()
            assert answer.finish_reasons == ["stop"]
            jsonschema.validate(json.loads(answer.text), SCHEMA)
            assert answer.text == expected.text
        fleet.assert_nothing_left(fleet.engines[1:])
    finally:
        fleet.close()
