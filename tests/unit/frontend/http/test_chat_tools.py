"""Tools of /v1/chat/completions: what reaches the model, what becomes of its calls, and what is refused."""

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from echo_app import EOS, TEMPLATE, Call, EchoPool, events
from fastapi import FastAPI

from services.frontend.http.app import create_app
from services.frontend.http.loaded_model import LoadedModel
from services.frontend.http.schemas.responses import ChatCompletion, ErrorResponse
from services.frontend.prompts.chat_template import ChatTemplate
from services.frontend.settings import FrontendSettings
from services.frontend.tokenizer import Tokenizer
from tests.unit.frontend.output.tool_transcripts import FORMATS

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TIME = {"type": "function", "function": {"name": "get_time"}}
TOOLS = [WEATHER, TIME]
CALLS = [("weather", {"city": "北京\n"}), ("get_time", {})]
WITH_TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}" + TEMPLATE
HERMES = dict(FORMATS[:1])["hermes"]
TEXT = f"Let me see.{HERMES(CALLS)}"


@pytest.fixture
def serve_tools(
    settings: FrontendSettings, make_model: Callable[..., LoadedModel], tokenizer: Tokenizer
) -> Callable[..., FastAPI]:
    def make(template: str = WITH_TOOLS, parser: str | None = "hermes", **changes: Any) -> FastAPI:
        model = make_model(template=ChatTemplate(tokenizer.hf, template), tool_call_parser=parser, **changes)
        return create_app(settings, [model])

    return make


@pytest.fixture
def call(serve_tools: Callable[..., FastAPI], pool: EchoPool) -> Call:
    pool.reply = TEXT
    return Call(serve_tools())


@pytest.fixture(autouse=True)
def _a_longer_context(pool: EchoPool) -> None:
    assert pool.limits is not None
    pool.limits = msgspec.structs.replace(pool.limits, max_model_len=4096)


def joined(stream: list[Any]) -> dict[int, dict[str, Any]]:
    """Each choice's message and finish reason, from its deltas, as clients put them together."""
    choices: dict[int, dict[str, Any]] = {}
    for event in stream:
        for choice in event["choices"]:
            whole = choices.setdefault(choice["index"], {"content": "", "calls": [], "reasoning": "", "finish": None})
            delta = choice["delta"]
            whole["content"] += delta.get("content") or ""
            whole["reasoning"] += delta.get("reasoning") or ""
            for piece in delta.get("tool_calls", ()):
                if "id" in piece:
                    assert piece["index"] == len(whole["calls"])
                    assert piece["type"] == "function"
                    whole["calls"].append({"id": piece["id"], "type": "function", "function": piece["function"]})
                else:
                    assert piece["index"] == len(whole["calls"]) - 1
                    whole["calls"][-1]["function"]["arguments"] += piece["function"]["arguments"]
            if choice["finish_reason"]:
                assert whole["finish"] is None
                whole["finish"] = choice["finish_reason"]
    return choices


def said(calls: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


def without_ids(calls: list[dict[str, Any]]) -> list[Any]:
    return [call["function"] for call in calls]


@pytest.mark.parametrize(("name", "write"), FORMATS, ids=lambda value: getattr(value, "__name__", value))
def test_calls_whole_and_streamed(
    serve_tools: Callable[..., FastAPI], pool: EchoPool, name: str, write: Callable[..., str]
) -> None:
    pool.reply = f"Let me see. {write(CALLS)}"
    call = Call(serve_tools(parser=name))
    response = call.chat(tools=TOOLS)
    (choice,) = ChatCompletion.model_validate_json(response.content).choices
    assert choice.finish_reason == "tool_calls"
    message = response.json()["choices"][0]["message"]
    assert message["content"] == "Let me see. "
    assert said(message["tool_calls"]) == CALLS
    assert len({tool_call["id"] for tool_call in message["tool_calls"]}) == len(CALLS)
    whole = joined(events(call.chat(tools=TOOLS, stream=True)))[0]
    assert (whole["content"], whole["finish"]) == ("Let me see. ", "tool_calls")
    assert without_ids(whole["calls"]) == without_ids(message["tool_calls"])


def test_arguments_stream_token_by_token(call: Call) -> None:
    stream = events(call.chat(tools=TOOLS, stream=True))
    assert sum("tool_calls" in choice["delta"] for event in stream for choice in event["choices"]) > 10


def test_an_answer_of_calls_alone_has_no_content(call: Call, pool: EchoPool) -> None:
    pool.reply = f"\n{HERMES(CALLS)}\n"
    message = call.chat(tools=TOOLS).json()["choices"][0]["message"]
    assert message["content"] is None
    assert said(message["tool_calls"]) == CALLS


def test_without_calls_nothing_is_special(call: Call, pool: EchoPool) -> None:
    pool.reply = "No tool is needed: <tool_box>."
    choice = call.chat(tools=TOOLS).json()["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": pool.reply, "refusal": None}
    assert choice["finish_reason"] == "stop"


def test_without_tools_calls_are_text(call: Call, pool: EchoPool) -> None:
    for fields in ({}, {"tools": []}, {"tools": None, "tool_choice": "auto"}, {"tools": TOOLS, "tool_choice": "none"}):
        choice = call.chat(**fields).json()["choices"][0]
        assert choice["message"]["content"] == TEXT
        assert "tool_calls" not in choice["message"]
        assert choice["finish_reason"] == "stop"
        assert not pool.tokenizer.decode(pool.submitted[-1].prompt_token_ids).startswith("[")


def test_broken_calls_are_text(call: Call, pool: EchoPool) -> None:
    pool.reply = "<tool_call>{oops}</tool_call>"
    choice = call.chat(tools=TOOLS).json()["choices"][0]
    assert choice["message"]["content"] == pool.reply
    assert choice["finish_reason"] == "stop"


def test_cut_off_anywhere_it_stays_length(call: Call) -> None:
    length = len(TEXT.encode())
    for max_tokens in (*range(1, length, 7), length):
        choice = call.chat(tools=TOOLS, max_tokens=max_tokens).json()["choices"][0]
        assert choice["finish_reason"] == "length"
        whole = joined(events(call.chat(tools=TOOLS, max_tokens=max_tokens, stream=True)))[0]
        assert whole["finish"] == "length"
        assert whole["content"] == (choice["message"]["content"] or "")
        assert without_ids(whole["calls"]) == without_ids(choice["message"].get("tool_calls", []))
    assert call.chat(tools=TOOLS, max_tokens=length + 1).json()["choices"][0]["finish_reason"] == "tool_calls"


def test_what_the_client_ended_did_not_end_by_itself(call: Call, pool: EchoPool) -> None:
    """Stop strings come first: one inside of the arguments ends them there."""
    pool.reply = HERMES([("weather", {"city": "New York"})])
    choice = call.chat(tools=TOOLS, stop="York").json()["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "York")
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "New '
    whole = joined(events(call.chat(tools=TOOLS, stop="York", stream=True)))[0]
    assert (without_ids(whole["calls"]), whole["finish"]) == (
        [{"name": "weather", "arguments": '{"city": "New '}],
        "stop",
    )
    choice = call.chat(tools=TOOLS, stop="</tool").json()["choices"][0]
    assert (choice["finish_reason"], said(choice["message"]["tool_calls"])) == (
        "stop",
        [("weather", {"city": "New York"})],
    )
    last = pool.tokenizer.encode(">", add_special_tokens=False)
    pool.reply += "!"
    eos = pool.tokenizer.token_id(EOS)
    assert call.chat(tools=TOOLS, stop_token_ids=last).json()["choices"][0]["finish_reason"] == "tool_calls"
    assert call.chat(tools=TOOLS, stop_token_ids=[eos]).json()["choices"][0]["finish_reason"] == "stop"


def test_with_one_call_allowed_the_model_does_not_go_on(call: Call, pool: EchoPool) -> None:
    fields = {"tools": TOOLS, "parallel_tool_calls": False}
    choice = call.chat(**fields).json()["choices"][0]
    assert said(choice["message"]["tool_calls"]) == CALLS[:1]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("tool_calls", None)
    assert not pool.running
    whole = joined(events(call.chat(stream=True, **fields)))[0]
    assert (said(whole["calls"]), whole["finish"]) == (CALLS[:1], "tool_calls")
    assert pool.delivered[pool.submitted[-1].request_id] < len(TEXT.encode())


def test_choices_keep_apart(call: Call) -> None:
    answer = call.chat(tools=TOOLS, n=3, logprobs=True).json()
    calls = [tool_call for choice in answer["choices"] for tool_call in choice["message"]["tool_calls"]]
    assert len({tool_call["id"] for tool_call in calls}) == 6
    whole = joined(events(call.chat(tools=TOOLS, n=3, stream=True)))
    assert [said(whole[index]["calls"]) for index in range(3)] == [CALLS] * 3


def test_logprobs_and_usage_are_of_all_tokens(call: Call) -> None:
    fields = {"tools": TOOLS, "logprobs": True, "return_token_ids": True}
    answer = call.chat(**fields).json()
    (choice,) = answer["choices"]
    num_tokens = len(TEXT.encode()) + 1
    assert answer["usage"]["completion_tokens"] == num_tokens
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"]) == num_tokens
    stream = events(call.chat(stream=True, stream_options={"include_usage": True}, **fields))
    assert stream[-1]["usage"] == answer["usage"]
    entries, ids = [], []
    for event in stream:
        for choice in event["choices"]:
            entries += (choice["logprobs"] or {"content": []})["content"]
            ids += choice.get("token_ids", [])
    assert entries == answer["choices"][0]["logprobs"]["content"]
    assert ids == answer["choices"][0]["token_ids"]


def test_reasoning_comes_before_tools(serve_tools: Callable[..., FastAPI], pool: EchoPool) -> None:
    thought = f"I could write {HERMES([('get_time', {})])}, but"
    pool.reply = f"<think>{thought}</think>\n\n{TEXT}"
    call = Call(serve_tools(reasoning_parser="qwen3"))
    choice = call.chat(tools=TOOLS).json()["choices"][0]
    assert choice["message"]["reasoning"] == thought
    assert choice["message"]["content"] == "Let me see."
    assert said(choice["message"]["tool_calls"]) == CALLS
    assert choice["finish_reason"] == "tool_calls"
    whole = joined(events(call.chat(tools=TOOLS, stream=True)))[0]
    assert (whole["reasoning"], whole["content"], said(whole["calls"])) == (thought, "Let me see.", CALLS)
    # Never closed, it was all thinking.
    pool.reply = f"<think>{thought}"
    choice = call.chat(tools=TOOLS).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "stop")
    assert "tool_calls" not in choice["message"]


def test_an_error_in_the_middle_of_a_call(call: Call, pool: EchoPool) -> None:
    pool.fail_after = len(TEXT.encode()) - 30
    assert call.chat(tools=TOOLS).status_code == 500
    stream = events(call.chat(tools=TOOLS, stream=True))
    assert stream[-1]["error"]["message"] == "the engine died"
    assert joined(stream[:-1])[0]["finish"] == "error"


def test_tools_reach_the_template_as_they_were_sent(call: Call, pool: EchoPool) -> None:
    extra = {**WEATHER, "function": {**WEATHER["function"], "strict": False, "returns": "text"}, "note": None}
    for choice in (None, "auto"):
        assert call.chat(tools=[extra, TIME], tool_choice=choice).status_code == 200
        prompt = pool.tokenizer.decode(pool.submitted[-1].prompt_token_ids)
        sent, end = json.JSONDecoder().raw_decode(prompt)
        expected = {**WEATHER, "function": {**WEATHER["function"], "returns": "text"}, "note": None}
        assert sent == [expected, TIME]
        assert prompt[end:] == "user:hello|assistant:"
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}
    assert call.post("/tokenize", body).json()["count"] > call.post("/tokenize", body | {"tools": None}).json()["count"]


def test_a_history_with_calls(serve_tools: Callable[..., FastAPI], pool: EchoPool) -> None:
    template = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.name }}({% for k, v in c.function.arguments | items %}{{ k }}={{ v }}{% endfor %}){% endfor %}|"
        "{% endfor %}{{ tools | tojson }}"
    )
    call = Call(serve_tools(template))
    for arguments, shown in (
        ('{"city": "Paris"}', "city=Paris"),
        ({"city": "Paris"}, "city=Paris"),
        ("", ""),
        (None, ""),
    ):
        messages = [
            {"role": "user", "content": "hi"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": "c", "type": "function", "function": {"name": "weather", "arguments": arguments}}
                ],
            },
            {"role": "tool", "tool_call_id": "c", "content": "sunny"},
        ]
        assert call.post("/v1/chat/completions", {"messages": messages, "tools": TOOLS}).status_code == 200
        prompt = pool.tokenizer.decode(pool.submitted[-1].prompt_token_ids)
        assert prompt.startswith(f"user:hi|assistant:weather({shown})|tool:sunny|")


def refused(response: Any, param: str) -> str:
    assert response.status_code == 400, response.text
    error = ErrorResponse.model_validate_json(response.content).error
    assert error.param == param
    return error.message


def test_a_template_without_a_place_for_tools(serve_tools: Callable[..., FastAPI], pool: EchoPool) -> None:
    call = Call(serve_tools(TEMPLATE))
    for choice in ("auto", "required", None):
        assert "template has no place for tools" in refused(call.chat(tools=TOOLS, tool_choice=choice), "tools")
    assert call.chat(tools=TOOLS, tool_choice="none").status_code == 200
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}
    refused(call.post("/tokenize", body), "tools")
    assert len(pool.submitted) == 1


def test_a_server_without_a_parser(serve_tools: Callable[..., FastAPI], pool: EchoPool) -> None:
    call = Call(serve_tools(parser=None))
    for choice in ("auto", "required", None):
        message = refused(call.chat(tools=TOOLS, tool_choice=choice), "tools")
        assert "--tool-call-parser" in message
        assert "hermes" in message
    assert call.chat(tools=TOOLS, tool_choice="none").status_code == 200
    assert len(pool.submitted) == 1


MALFORMED: list[tuple[dict[str, Any], str]] = [
    ({"tools": {}}, "tools"),
    ({"tools": [5]}, "tools[0]"),
    ({"tools": [{}]}, "tools[0].type"),
    ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
    ({"tools": [WEATHER, {"type": "function", "function": {"name": ""}}]}, "tools[1].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "a\n"}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "n" * 257}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]}, "tools[0].function.parameters"),
    ({"tools": [{"type": "function", "function": {"name": "f", "strict": 1}}]}, "tools[0].function.strict"),
    ({"tools": [{"type": "function", "function": {"name": "f", "description": 1}}]}, "tools[0].function.description"),
    ({"tools": [TIME, TIME]}, "tools"),
    ({"tools": [TIME] * 1025}, "tools"),
    ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": 5}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {}}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"function_call": {"name": "f"}}, "function_call"),
]


@pytest.mark.parametrize(("fields", "param"), MALFORMED)
def test_malformed_tools_name_their_field(call: Call, pool: EchoPool, fields: dict[str, Any], param: str) -> None:
    refused(call.chat(**fields), param)
    assert not pool.submitted


def test_the_older_fields_that_ask_for_nothing(call: Call) -> None:
    for value in (None, "none", "auto"):
        assert call.chat(function_call=value, functions=None).status_code == 200
