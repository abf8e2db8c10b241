"""A large body is read in parts, and comes out as if it had been read at once: its values, or what is wrong with it.
Bodies of very many values are refused before they are parsed; what is only text is not counted."""

import asyncio
import json
import re
from typing import Any

import pytest
from echo_app import Call, EchoPool
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pydantic_core import from_json

from services.frontend.http import json_body
from services.frontend.http.errors import ApiError
from services.frontend.http.json_body import MAX_CONTAINERS, MAX_OTHER_BYTES, MAX_TOKEN_IDS, MAX_VALUES, TokenIds
from services.frontend.http.turns import Turns


def read(body: bytes) -> Any:
    return asyncio.run(json_body.read_json(body, Turns()))


def outcome(parse: Any, body: bytes) -> Any:
    try:
        return repr(parse(body))
    except ValueError as error:
        # Of a byte that is no text the parser counts the place otherwise, according to the escapes before it.
        return re.sub(r"(invalid unicode code point) at .*", r"\1", str(error))


def read_at_once(body: bytes) -> Any:
    return from_json(body, allow_inf_nan=False)


@pytest.fixture
def in_small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that bodies of a few hundred bytes are cut everywhere."""
    monkeypatch.setattr(json_body, "FEW_BYTES", 0)
    monkeypatch.setattr(json_body, "PART_BYTES", 40)
    monkeypatch.setattr(json_body, "LEAST_BYTES", 30)


# Many ways to write the same, and many that are wrong.
BLANKS = st.text("\n\t ", max_size=3)
SIGNS = ["a", "é", "北", "👍", "\\n", '\\"', "\\\\", "\\u00e9", "\\ud83d\\ude00", "[1,", "{", ","]
TEXT = st.lists(st.sampled_from(SIGNS)).map("".join)
PIECES = st.one_of(
    TEXT.map(lambda text: f'"{text}"'),
    TEXT.map(lambda text: f'"{text * 20}"'),
    st.lists(st.integers(-9, 10**18)).map(json.dumps),
    st.tuples(st.lists(st.integers(0, 50_000), min_size=20), BLANKS).map(
        lambda given: "[" + f"{given[1]},{given[1]}".join(map(str, given[0])) + "]"
    ),
    st.sampled_from(["1", "-0.5e3", "true", "null", "{}", "[]", "[[1, 2], [3]]"]),
)
WHOLE = st.lists(st.tuples(TEXT, PIECES), max_size=6).map(
    lambda items: "{" + ", ".join(f'"{key * 5}": {value}' for key, value in items) + "}"
)
WRONG = st.sampled_from(
    [b"", b",", b"]", b"[", b'"', b"\\", b"\\ud83d", b"\xff", b"\x80", b"\x01", b"x", b"01", b"-", b"\n"]
)
SETTINGS = settings(
    max_examples=300,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@SETTINGS
@given(WHOLE)
@example('{"a": "' + "北" * 50 + '", "' + "k" * 100 + '": [' + "1," * 60 + "2]}")
@example("[" + "7 , " * 40 + "7]")
@example("[" + "7," * 40 + '"' + "x" * 90 + '", {"a": [' + "8," * 40 + "9]}]")
@pytest.mark.usefixtures("in_small_parts")
def test_what_is_read_in_parts_is_what_is_read_at_once(body: str) -> None:
    assert outcome(read, body.encode()) == outcome(read_at_once, body.encode())


@SETTINGS
@given(WHOLE, WRONG, st.floats(0, 1), st.integers(0, 2))
@example('{"a": [' + "1," * 60 + "2]}", b",", 0.5, 0)
@example('{"a": "' + "é" * 60 + '"}', b"\\", 0.5, 0)
@pytest.mark.usefixtures("in_small_parts")
def test_what_is_wrong_is_told_as_if_it_were_read_at_once(body: str, wrong: bytes, where: float, cut: int) -> None:
    data = body.encode()
    at = round(where * len(data))
    data = data[:at] + wrong + data[at + cut :]
    assert outcome(read, data) == outcome(read_at_once, data)


def test_token_ids_need_not_be_looked_at_again() -> None:
    body = json.dumps({"prompt": [list(range(8000))] * 64, "mixed": [*range(5000), None]}).encode()
    value = read(body)
    assert value == json.loads(body)
    assert {type(prompt) for prompt in value["prompt"]} == {TokenIds}
    assert type(value["mixed"]) is list


@pytest.mark.parametrize(
    "body",
    [
        json.dumps({"prompt": [list(range(8000))] * 64}).encode(),
        json.dumps({"prompt": "naïve 北京 👍\n" * 100_000}).encode(),
        b'{"prompt": [' + b"1," * 500_000 + b",]}",
        b'{"prompt": "' + b"\\u00e9" * 500_000 + b"\\u00",
        json.dumps({"messages": [{"role": "user", "content": "hi"}] * 9000}).encode(),
    ],
    ids=["token ids", "text", "wrong token ids", "wrong text", "messages"],
)
def test_others_have_their_turns_while_a_large_body_is_read(
    call: Call, body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However fast the machine is: a turn is as many parts here as it would be at a hundredth of the speed."""
    turns = 0

    async def take_turn(self: Turns) -> None:
        nonlocal turns
        turns += 1
        await asyncio.sleep(0)

    monkeypatch.setattr(Turns, "over", True)
    monkeypatch.setattr(Turns, "next", take_turn)
    response = call.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert turns >= min(100, len(body) // json_body.PART_BYTES)


@pytest.mark.parametrize(
    "body",
    [
        b"[" + b",".join([b"{}"] * MAX_CONTAINERS) + b"]",
        b"[" * (MAX_CONTAINERS + 1),
        b"[" + b",".join([b"1"] * (MAX_TOKEN_IDS + 9000)) + b"]",
        b"[" + b",".join([b"1.5"] * (MAX_VALUES + 1)) + b"]",
        b'["' + b'","'.join([b"[]"] * (MAX_VALUES + 1)) + b'"]',
        b"[" + b" " * MAX_OTHER_BYTES + b"]",
        # A string that never ends hides nothing before it.
        b"[" + b",".join([b"[]"] * MAX_CONTAINERS) + b'"',
    ],
    ids=["objects", "nesting", "token ids", "numbers", "strings", "blanks", "broken"],
)
def test_too_many_values_are_refused(body: bytes) -> None:
    with pytest.raises(ApiError) as refusal:
        read(body)
    assert refusal.value.status == 400


@pytest.mark.parametrize(
    "value",
    [
        "{[," * MAX_CONTAINERS,
        '\\" {[, "\\' * MAX_CONTAINERS,
        "," * (2 * MAX_VALUES),
        [["{" * 50, '"[', "\\"]] * (MAX_CONTAINERS // 4),
        list(range(64 * 8000)),
    ],
    ids=["code", "escapes", "commas", "many strings", "token ids"],
)
def test_text_is_not_counted_and_long_prompts_pass(value: object) -> None:
    assert read(json.dumps({"prompt": value}).encode()) == {"prompt": value}


def test_a_route_says_so(call: Call, pool: EchoPool) -> None:
    response = call.chat(metadata=[{}] * (MAX_CONTAINERS + 1))
    assert response.status_code == 400
    assert "objects and lists" in response.json()["error"]["message"]
    assert pool.submitted == []
    assert call.chat(metadata=["{}"] * (MAX_CONTAINERS + 1)).status_code == 200


def test_a_long_conversation_is_told_its_first_fault(call: Call) -> None:
    good, bad = {"role": "user", "content": "hello, here is some text"}, {"role": "nobody", "content": 1}
    for fields in ({}, {"temperature": "hot"}):
        answers = [
            call.post("/v1/chat/completions", {"messages": [good] * count + [bad] * 5, **fields}).json()
            for count in (2, 2000)
        ]
        params = [answer["error"]["param"] for answer in answers]
        assert params == (["temperature"] * 2 if fields else ["messages[2].role", "messages[2000].role"])
