"""The `openai` client calls tools on SmolLM2, which a chat template of its own tells of them: loops of asking, calling,
answering; required, named and strict functions; the client's helpers."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field

from loadtest.server_process import ROOT, tandem_serve

MODEL = "smol"
CITIES = ["Paris", "Oslo", "Rome"]
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": CITIES},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
        "units": {"type": "array", "items": {"enum": ["C", "F"]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
CLOCK: dict[str, Any] = {
    "type": "object",
    "properties": {"zone": {"type": "string", "pattern": "^UTC[+-][0-9]{1,2}$"}},
    "required": ["zone"],
    "additionalProperties": False,
}
SCHEMAS = {"get_weather": WEATHER, "get_time": CLOCK}
QUESTION = [{"role": "user", "content": "What will the weather in Oslo be, and what time is it there?"}]


def function(name: str, **fields: Any) -> dict[str, Any]:
    described = {"name": name, "description": f"Use it to {name.replace('_', ' ')}.", "parameters": SCHEMAS[name]}
    return {"type": "function", "function": described | fields}


TOOLS = [function("get_weather"), function("get_time")]
Ask = Callable[..., Any]


@pytest.fixture(scope="module")
def client(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    flags = ["--dtype", "float32", "--kv-cache-memory", "0.5", "--max-model-len", "2048"]
    flags += ["--chat-template", str(ROOT / "docs/chat-templates/chatml-hermes.jinja"), "--served-model-name", MODEL]
    with (
        tandem_serve(tmp_path_factory.mktemp("tools"), "--model", str(smollm2), *flags) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as client,
    ):
        yield client


@pytest.fixture
def ask(client: openai.OpenAI) -> Ask:
    def create(**fields: Any) -> Any:
        body = {"model": MODEL, "messages": QUESTION, "tools": TOOLS, "max_tokens": 200, "temperature": 0} | fields
        return client.chat.completions.create(**body)

    return create


def check(call: Any) -> Any:
    """A call's arguments, which follow its function's schema."""
    arguments = json.loads(call.function.arguments)
    jsonschema.validate(arguments, SCHEMAS[call.function.name])
    assert call.type == "function"
    assert call.id.startswith("call_")
    return arguments


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_time"}}])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_loop_of_asking_calling_and_answering(client: openai.OpenAI, ask: Ask, choice: Any, stream: bool) -> None:
    fields: dict[str, Any] = {"tool_choice": choice, "parallel_tool_calls": False}
    if stream:
        body = {"model": MODEL, "messages": QUESTION, "tools": TOOLS, "max_tokens": 200, "temperature": 0}
        with client.chat.completions.stream(**body, **fields) as events:
            answer: Any = events.get_final_completion()
    else:
        answer = ask(**fields)
    (chosen,) = answer.choices
    assert chosen.finish_reason == "tool_calls"
    assert not chosen.message.content
    (call,) = chosen.message.tool_calls
    check(call)
    if choice != "required":
        assert call.function.name == "get_time"
    # Streamed and whole say the same.
    assert call.function.arguments == ask(**fields).choices[0].message.tool_calls[0].function.arguments

    said = chosen.message.model_dump(include={"role", "content", "tool_calls"}, exclude_none=True)
    result = {"role": "tool", "tool_call_id": call.id, "content": "It is 12:00, and it rains."}
    messages = [*QUESTION, said, result]
    final = ask(messages=messages, tool_choice="none", max_tokens=24).choices[0]
    assert final.message.content
    assert final.message.tool_calls is None
    # The history reaches the model: the same question without it is answered otherwise.
    counted = ask(messages=messages, max_tokens=1).usage.prompt_tokens
    assert counted > ask(max_tokens=1).usage.prompt_tokens + 20


def test_required_calls_are_valid_at_any_temperature(ask: Ask) -> None:
    finished = 0
    for seed in range(4):
        answer = ask(tool_choice="required", temperature=1.0, seed=seed, n=2, max_tokens=120)
        for choice in answer.choices:
            # Of a call that was cut off before its arguments began, what there is.
            content = (choice.message.content or "").lstrip()
            assert not content or (content.startswith("<tool_call>") and choice.finish_reason == "length")
            calls = choice.message.tool_calls or []
            whole = calls if choice.finish_reason == "tool_calls" or content else calls[:-1]
            for call in whole:
                check(call)
            finished += choice.finish_reason == "tool_calls"
    assert finished


def test_several_calls_stream_as_they_come(ask: Ask) -> None:
    fields = {"tool_choice": "required", "temperature": 1.0, "seed": 3, "max_tokens": 120}
    whole = ask(**fields).choices[0]
    calls: list[list[str]] = []
    reasons: list[str] = []
    usage = None
    for chunk in ask(**fields, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            for delta in choice.delta.tool_calls or []:
                if delta.id:
                    calls.append([delta.function.name, ""])
                calls[delta.index][1] += delta.function.arguments
            reasons += [choice.finish_reason] if choice.finish_reason else []
    assert calls == [[call.function.name, call.function.arguments] for call in whole.message.tool_calls]
    assert reasons == [whole.finish_reason]
    assert usage is not None


class Forecast(BaseModel):
    """Forecasts the weather."""

    city: Literal["Paris", "Oslo"]
    days: int = Field(ge=1, le=7)


def test_the_clients_helpers_with_pydantic_functions(client: openai.OpenAI) -> None:
    tool = openai.pydantic_function_tool(Forecast)
    body: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 200}
    fields: dict[str, Any] = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    parsed = client.chat.completions.parse(**body, **fields)
    (call,) = parsed.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Forecast)

    kinds: list[str] = []
    with client.chat.completions.stream(**body, **fields) as stream:
        for event in stream:
            kinds.append(event.type)
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.delta" in kinds
    assert kinds.count("tool_calls.function.arguments.done") == 1
    (streamed,) = final.choices[0].message.tool_calls or []
    assert streamed.function.parsed_arguments == call.function.parsed_arguments


def test_a_strict_function_is_held_to_its_schema_where_the_model_chooses_to_call(ask: Ask) -> None:
    """The history ends in the middle of a call, so that the model goes on with one."""
    tools = [function("get_weather", strict=True), function("get_time")]
    begun = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "'
    fields: dict[str, Any] = {"tools": tools, "temperature": 1.5, "max_tokens": 150}
    free = ask(**fields, seed=1).choices[0]
    assert free.message.content or free.message.tool_calls
    for seed in range(2):
        choice = ask(
            messages=[{"role": "user", "content": f"Repeat exactly, with no other word: {begun}Oslo"}],
            seed=seed,
            **fields,
        ).choices[0]
        for call in choice.message.tool_calls or []:
            if call.function.name == "get_weather" and choice.finish_reason == "tool_calls":
                check(call)


@pytest.mark.parametrize(
    ("parameters", "place"),
    [
        ({"type": "object", "properties": {"a": {"type": "string", "not": {}}}}, "properties.a.not"),
        ({"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}}, "properties.a"),
        ({"type": "array"}, ""),
        ({"type": "object", "properties": {"a": {"$ref": "https://example.com/schema"}}}, "properties.a.$ref"),
        ({"type": "object", "properties": {"a": {"enum": ["x" * 40] * 10_000}}}, ""),
    ],
)
def test_schemas_that_cannot_be_enforced_are_refused(ask: Ask, parameters: dict[str, Any], place: str) -> None:
    tools = [TOOLS[1], {"type": "function", "function": {"name": "f", "parameters": parameters}}]
    with pytest.raises(openai.BadRequestError) as refused:
        ask(tools=tools, tool_choice="required")
    expected = "tools[1].function.parameters"
    assert refused.value.param in (f"{expected}.{place}" if place else expected, "tools")
    # Where nothing is enforced, the schema only reaches the model.
    if len(json.dumps(parameters)) < 1000:
        assert ask(tools=tools, max_tokens=1).choices[0].finish_reason in ("length", "stop")
