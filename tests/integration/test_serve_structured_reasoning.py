"""Reasoning, then a grammar, through real processes: the simulated executor's echo writes what it is told to, until the
grammar will not have it."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest
from process_fleet import ProcessFleet, wait_until
from said_chat import Said, streamed, whole

from tests import tokenizers_at_hand

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Oslo"]}, "days": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA, "strict": True}}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "book", "parameters": SCHEMA, "strict": True},
    },
    {"type": "function", "function": {"name": "note", "parameters": {}}},
]
THOUGHT = 'Should it be {"city": "Rome"}, or <b>none?'
ANSWER = '{"city": "Oslo", "days": 12}'
TURN = "<｜begin▁of▁sentence｜>"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessFleet]:
    """The second frontend has the grammar hold while the model reasons, too."""
    scratch = tmp_path_factory.mktemp("reasoning")
    folder = tokenizers_at_hand.write_model_folder(tokenizers_at_hand.deepseek(), scratch / "model")
    template = scratch / "template.jinja"
    template.write_text("{{ messages[-1].content }}" + TURN + "{% if tools %}{% endif %}", encoding="utf-8")
    fleet = ProcessFleet(
        scratch,
        folder,
        num_frontends=2,
        num_engines=1,
        engine={"simulated_tokens": "echo", "heartbeat_timeout": 10},
        frontend={
            "chat_template": template,
            "reasoning_parser": "qwen3",
            "tool_call_parser": "hermes",
            "heartbeat_timeout": 10,
        },
    )
    fleet.frontends[1].settings["structured_output_in_reasoning"] = True
    try:
        for member in fleet.members:
            member.start()
        for member in fleet.members:
            wait_until(lambda member=member: member.is_up, "a process serves", timeout=120)
        fleet.wait_connected()
        yield fleet
        fleet.assert_nothing_left()
    finally:
        fleet.close()


def ask(fleet: ProcessFleet, content: str, *, frontend: int = 0, **fields: Any) -> Said:
    """What is answered, streamed as whole."""

    async def main() -> Said:
        url = f"http://127.0.0.1:{fleet.frontends[frontend].port}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as client:
            said = await whole(client, "m", content, **{"max_tokens": 200, **fields})
            assert await streamed(client, "m", content, **{"max_tokens": 200, **fields}) == said
            return said

    return asyncio.run(main())


def check(text: str) -> None:
    jsonschema.validate(json.loads(text), SCHEMA)


def test_reasoning_is_free_and_the_grammar_begins_after_it(fleet: ProcessFleet) -> None:
    said = ask(fleet, f"<think>{THOUGHT}</think>\n\n{ANSWER} and more", response_format=FORMAT)
    assert (said.reasoning, said.content, said.finish_reason) == (THOUGHT, ANSWER, "stop")
    # What does not follow the schema does not come, however the model would have it.
    said = ask(fleet, f'<think>{THOUGHT}</think>\n\n{{"city": "Rome", "days": 1000}}', response_format=FORMAT)
    assert said.reasoning == THOUGHT
    assert said.finish_reason == "stop"
    assert said.content != ANSWER
    check(said.content)


def test_an_answer_without_reasoning_follows_the_grammar_at_once(fleet: ProcessFleet) -> None:
    said = ask(fleet, ANSWER, response_format=FORMAT)
    assert (said.reasoning, said.content, said.finish_reason) == ("", ANSWER, "stop")


def test_cut_off_while_it_reasons(fleet: ProcessFleet) -> None:
    said = ask(fleet, f"<think>{THOUGHT}</think>\n\n{ANSWER}", response_format=FORMAT, max_tokens=6)
    assert said.content == ""
    assert THOUGHT.startswith(said.reasoning)
    assert said.finish_reason == "length"


def test_a_setting_has_the_grammar_hold_in_the_reasoning_too(fleet: ProcessFleet) -> None:
    said = ask(fleet, f"<think>{THOUGHT}</think>\n\n{ANSWER}", frontend=1, response_format=FORMAT)
    assert said.finish_reason == "stop"
    check(said.content or said.reasoning)
    assert THOUGHT not in said.content + said.reasoning


def test_calls_are_held_to_their_schemas_after_the_reasoning(fleet: ProcessFleet) -> None:
    call = f'<tool_call>\n{{"name": "book", "arguments": {ANSWER}}}\n</tool_call>'
    required: Any = {"tool_choice": "required", "parallel_tool_calls": False}
    said = ask(fleet, f"<think>{THOUGHT} {call}</think>\n\n{call}", tools=TOOLS, **required)
    assert said.reasoning == f"{THOUGHT} {call}"
    assert (said.calls, said.finish_reason) == ([("book", ANSWER)], "tool_calls")


@pytest.mark.parametrize("thought", ["", f"<think>{THOUGHT}</think>\n\n"], ids=["at once", "after reasoning"])
def test_a_strict_function_is_held_to_its_schema_where_the_model_chooses_to_call(
    fleet: ProcessFleet, thought: str
) -> None:
    """Text is free, and so are the arguments of functions that are not strict."""
    wrong = '{"city": "Rome", "days": "many", "why": []}'
    calls = [f'<tool_call>\n{{"name": "{name}", "arguments": {wrong}}}\n</tool_call>' for name in ("note", "book")]
    said = ask(fleet, f"{thought}Let me see: {calls[0]}\n{calls[1]}", tools=TOOLS, max_tokens=300)
    assert said.content.startswith("Let me see: ")
    assert said.calls[0][0] == "note"
    assert json.loads(said.calls[0][1]) == json.loads(wrong)
    assert said.calls[1][0] == "book"
    check(said.calls[1][1])
    right = f'<tool_call>\n{{"name": "book", "arguments": {ANSWER}}}\n</tool_call>'
    said = ask(fleet, f"{thought}Let me see: {right}", tools=TOOLS)
    assert said.calls == [("book", ANSWER)]
    assert said.finish_reason == "tool_calls"
    # Without `strict` the very same is passed on.
    free = [{"type": "function", "function": {**tool["function"], "strict": False}} for tool in TOOLS]
    said = ask(fleet, f"{thought}{calls[1]}", tools=free)
    assert [(name, json.loads(arguments)) for name, arguments in said.calls] == [("book", json.loads(wrong))]
