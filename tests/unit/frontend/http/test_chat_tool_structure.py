"""What the engine is told to hold calls to, and what is refused because it could not be."""

from collections.abc import Callable
from typing import Any

import httpx
import pytest
from echo_app import TEMPLATE, EchoPool, LiveServer
from fastapi import FastAPI

from services.frontend.http.app import create_app
from services.frontend.http.loaded_model import LoadedModel
from services.frontend.prompts.chat_template import ChatTemplate
from services.frontend.settings import FrontendSettings
from services.frontend.tokenizer import Tokenizer
from shared.structured_output import GRAMMAR, StructuredOutput

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "Which (((", "enum": ["Paris", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
TIME = {"type": "function", "function": {"name": "get_time"}}
TOOLS = [TIME, WEATHER]
NAMED = {"type": "function", "function": {"name": "weather"}}
Ask = Callable[..., httpx.Response]


@pytest.fixture
def start(
    settings: FrontendSettings,
    make_model: Callable[..., LoadedModel],
    tokenizer: Tokenizer,
    serve: Callable[[FastAPI], LiveServer],
) -> Callable[..., Ask]:
    """A server whose model has a parser; the process that checks grammars lives as long as its loop does."""

    def start(parser: str = "hermes", **changes: Any) -> Ask:
        template = ChatTemplate(tokenizer.hf, TEMPLATE + "{% if tools %}{% endif %}")
        server = serve(create_app(settings, [make_model(template=template, tool_call_parser=parser, **changes)]))

        def ask(**fields: Any) -> httpx.Response:
            body = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, **fields}
            return httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)

        return ask

    return start


def sent(pool: EchoPool) -> StructuredOutput | None:
    return pool.submitted[-1].sampling.structured_output


def test_what_is_enforced(start: Callable[..., Ask], pool: EchoPool) -> None:
    ask = start()
    for fields in ({}, {"tool_choice": "auto"}, {"tool_choice": "none"}):
        assert ask(**fields).status_code == 200
        assert sent(pool) is None

    assert ask(tool_choice="required").status_code == 200
    required = sent(pool)
    assert required is not None
    assert required.kind == GRAMMAR
    assert all(name in required.value for name in ("weather", "get_time", "Paris"))
    assert ") *" in required.value or ")*" in required.value
    # What only tells the model about a schema is not the engine's business.
    assert "(((" not in required.value

    assert ask(tool_choice=NAMED, parallel_tool_calls=False).status_code == 200
    named = sent(pool)
    assert named is not None
    assert "get_time" not in named.value
    assert ")*" not in named.value

    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}  # type: ignore[dict-item]
    assert ask(tools=[TIME, strict]).status_code == 200
    free = sent(pool)
    assert free is not None
    assert "[lazy]" in free.value
    assert "Paris" in free.value


def test_the_grammar_begins_after_the_reasoning(start: Callable[..., Ask], pool: EchoPool) -> None:
    ask = start(reasoning_parser="qwen3")
    assert ask(tool_choice="required").status_code == 200
    structured = sent(pool)
    assert structured is not None
    assert (structured.reasoning_start, structured.reasoning_end) == ("<think>", "</think>")
    assert ask(tool_choice="required", chat_template_kwargs={"enable_thinking": False}).status_code == 200
    structured = sent(pool)
    assert structured is not None
    assert structured.reasoning_end == ""


def test_other_structures_beside_tools(start: Callable[..., Ask], pool: EchoPool) -> None:
    ask = start()
    schema = {"type": "object", "properties": {"yes": {"type": "boolean"}}}
    response_format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    assert ask(response_format=response_format).status_code == 200
    structured = sent(pool)
    assert structured is not None
    assert '"yes"' in structured.value
    assert "weather" in structured.value
    assert ask(response_format=response_format, tool_choice="required").status_code == 200
    structured = sent(pool)
    assert structured is not None
    assert '"yes"' not in structured.value
    count = len(pool.submitted)
    for fields in (
        {"structured_outputs": {"choice": ["a"]}},
        {"structured_outputs": {"json": schema}, "tool_choice": "required"},
        {"guided_regex": "a+"},
    ):
        refused = ask(**fields)
        assert refused.status_code == 400
        assert "cannot be combined with tools" in refused.json()["error"]["message"]
    assert len(pool.submitted) == count


PLACE = "tools[1].function.parameters"


@pytest.mark.parametrize(
    ("parameters", "param"),
    [
        ({"type": "string"}, PLACE),
        ({"type": "object", "properties": {"a": {"not": {}}}}, f"{PLACE}.properties.a.not"),
        ({"type": "object", "properties": []}, f"{PLACE}.properties"),
        ({"properties": {"a": {"$ref": "http://other/schema"}}}, f"{PLACE}.properties.a.$ref"),
        ({"properties": {"a": {"type": "string", "pattern": "("}}}, f"{PLACE}.properties.a"),
        ({"properties": {"a": {"enum": [f"{number:040}" for number in range(10_000)]}}}, PLACE),
    ],
)
def test_schemas_that_cannot_be_enforced(
    start: Callable[..., Ask], pool: EchoPool, parameters: dict[str, Any], param: str
) -> None:
    ask = start()
    tools = [TIME, {"type": "function", "function": {"name": "f", "parameters": parameters}}]
    refused = ask(tools=tools, tool_choice="required")
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == param
    assert not pool.submitted


def test_what_the_format_cannot_be_held_to(start: Callable[..., Ask], pool: EchoPool) -> None:
    ask = start("pythonic")
    assert ask(tool_choice="required").status_code == 200
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"anyOf": [{}]}}}]
    refused = ask(tools=tools, tool_choice="required")
    assert refused.status_code == 400
    assert "the schema of f has anyOf" in refused.json()["error"]["message"]
    assert len(pool.submitted) == 1
