"""Constrained streams through the death of their engine: all valid, and what they would have been undisturbed."""

import asyncio
import json
from pathlib import Path
from typing import Any

import jsonschema
from killed_engine import model_fleet, stream_through_a_kill
from process_fleet import ROOT
from streamed_answer import StreamedAnswer

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


# Of completions and of chats, with a schema, and with a call that has to be made.
FORMAT = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA, "strict": True}}
TOOLS = [{"type": "function", "function": {"name": "write", "parameters": SCHEMA}}]
FIELDS: tuple[dict[str, Any], ...] = (
    {"structured_outputs": {"json": SCHEMA}},
    {"response_format": FORMAT},
    {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
)


def test_constrained_streams_survive_a_killed_engine(smollm2: Path, tmp_path: Path) -> None:
    fleet = model_fleet(tmp_path, smollm2)
    for frontend in fleet.frontends:
        frontend.settings["chat_template"] = ROOT / "docs/chat-templates/chatml-hermes.jinja"
    requests: list[tuple[str, dict[str, Any]]] = []
    for fields in FIELDS:
        for prompt in PROMPTS if "structured_outputs" in fields else PROMPTS[:2]:
            for settings in SETTINGS:
                body = {"max_tokens": 200, **fields, **settings}
                if "structured_outputs" in fields:
                    requests.append(("/v1/completions", {"prompt": prompt, **body}))
                else:
                    body["messages"] = [{"role": "user", "content": prompt}]
                    requests.append(("/v1/chat/completions", body))

    try:
        fleet.start()
        undisturbed, answers = asyncio.run(stream_through_a_kill(fleet, requests, 40))
        assert fleet.frontend_metric("failovers_total") > 0
        for (_, body), answer, expected in zip(requests, answers, undisturbed, strict=True):
            assert answer.complete, answer.describe()
            calls = called(answer)
            assert answer.finish_reasons == (["tool_calls"] if "tools" in body else ["stop"])
            assert [name for name, _ in calls] == (["write"] if "tools" in body else [])
            jsonschema.validate(json.loads(calls[0][1] if calls else answer.text), SCHEMA)
            assert answer.text == expected.text
            assert calls == called(expected)
        fleet.assert_nothing_left(fleet.engines[1:])
    finally:
        fleet.close()


def called(answer: StreamedAnswer) -> list[tuple[str, str]]:
    """The names and arguments of a chat's calls."""
    calls: list[tuple[str, str]] = []
    for choice in answer.choices():
        for delta in choice.get("delta", {}).get("tool_calls") or []:
            if "id" in delta:
                calls.append((delta["function"]["name"], ""))
            name, arguments = calls[-1]
            calls[-1] = (name, arguments + (delta["function"].get("arguments") or ""))
    return calls
