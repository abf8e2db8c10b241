"""A large body is read in parts, and comes out as if it had been read at once. One of very many values is refused
before it is parsed; what is only text is not counted."""

import asyncio
import json
from typing import Any

import pytest
from echo_app import Call, EchoPool
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pydantic_core import from_json

from services.frontend.http import json_body, json_size
from services.frontend.http.errors import ApiError
from services.frontend.http.json_body import TokenIds, WholeNumbers, as_token_ids
from services.frontend.http.json_size import MAX_CONTAINERS, MAX_STRINGS, MAX_VALUES, count_json
from services.frontend.http.turns import Turns


def read(body: bytes) -> Any:
    return asyncio.run(json_body.read_json(body, Turns()))


def outcome(parse: Any, body: bytes) -> str:
    try:
        value = parse(body)
    except (ValueError, ApiError):
        return "refused"
    return repr(value) if isinstance(value, dict) else "refused"


def read_at_once(body: bytes) -> Any:
    return from_json(body, allow_inf_nan=False)


@pytest.fixture
def in_small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that bodies of a few hundred bytes are cut everywhere."""
    monkeypatch.setattr(json_body, "PART_BYTES", 8)


# Many ways to write the same, and many that are wrong.
BLANKS = st.text("\n\t\r ", max_size=3)
SIGNS = ["a", "é", "北", "👍", "\\n", '\\"', "\\\\", "\\u00e9", "\\ud83d\\ude00", "\\ud83d", "[1,", "{", ",", '": "']
TEXT = st.lists(st.sampled_from(SIGNS)).map(lambda signs: '"' + "".join(signs) + '"')
SCALARS = st.one_of(TEXT, st.integers(-9, 10**20).map(str), st.sampled_from(["-0.5e3", "true", "null", "{}", "[]"]))


def lists(items: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    listed = st.tuples(BLANKS, st.lists(items))
    return listed.map(lambda given: f"[{given[0]}" + f"{given[0]},{given[0]}".join(given[1]) + f"{given[0]}]")


def objects(values: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    fields = st.lists(st.tuples(BLANKS, TEXT, values))
    return fields.map(
        lambda fields: "{" + ",".join(f"{blank}{key}{blank}: {value}" for blank, key, value in fields) + "}"
    )


UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
VALUES = st.recursive(SCALARS, lambda values: lists(values) | objects(values), max_leaves=20)
WRONG = st.sampled_from(
    [b"", b",", b"]", b"[", b'"', b"\\", b"\\ud83d", b"\xff", b"\x80", b"\x01", b"x", b"01", b"-", b"\n", b"NaN"]
)


@given(objects(VALUES) | lists(VALUES))
@example('{"a": [1, 2, "x", [3]], "a": [[1, 2], [3, 4.0]]}')
@UNHURRIED
@pytest.mark.usefixtures("in_small_parts")
def test_what_is_read_in_parts_is_what_is_read_at_once(body: str) -> None:
    assert outcome(read, body.encode()) == outcome(read_at_once, body.encode())


@given(objects(VALUES), WRONG, st.floats(0, 1), st.integers(0, 2))
@example('{"a": [[1, 2], [3]]}', b",", 0.6, 0)
@UNHURRIED
@pytest.mark.usefixtures("in_small_parts")
def test_what_is_wrong_is_refused_as_if_it_were_read_at_once(body: str, wrong: bytes, where: float, cut: int) -> None:
    data = body.encode()
    at = round(where * len(data))
    data = data[:at] + wrong + data[at + cut :]
    assert outcome(read, data) == outcome(read_at_once, data)


def test_token_ids_need_not_be_looked_at_again() -> None:
    body = json.dumps({"prompt": [list(range(8000))] * 48, "mixed": [*range(50_000), None], "one": list(range(50_000))})
    value = read(body.encode())
    assert value == json.loads(body)
    assert {type(prompt) for prompt in value["prompt"]} == {TokenIds}
    assert type(value["mixed"]) is list
    assert type(value["one"]) is TokenIds


@pytest.mark.parametrize("last", [1, 2.0, 2.5, None, 1e300])
@pytest.mark.parametrize("first", [1, 0.0, -0.5, True])
def test_numbers_stay_as_they_were_sent_and_are_known_to_be_whole(first: object, last: object) -> None:
    """Wherever in a list of many parts the one is that is written with a point."""
    numbers = [first, *range(30_000), last]
    (read_numbers,) = read(json.dumps({"prompt": numbers}).encode()).values()
    assert list(map(repr, read_numbers)) == list(map(repr, numbers))
    whole = all(type(number) is int or (type(number) is float and number.is_integer()) for number in (first, last))
    token_ids = as_token_ids(read_numbers)
    assert (token_ids is not None) == whole == isinstance(read_numbers, TokenIds | WholeNumbers)
    if token_ids is not None:
        assert token_ids == numbers
        assert set(map(type, token_ids)) == {int}
        assert token_ids is as_token_ids(read_numbers)  # made once, in parts


def test_names_that_end_in_backslashes_are_counted() -> None:
    names = json.dumps({f"{number}\\": number for number in range(json_body.MAX_VALUES_AT_ONCE + 1)})
    with pytest.raises(ApiError, match="of more than"):
        read(f'{{"logit_bias": {names}}}'.encode())


def test_a_list_that_is_ids_and_more_is_none() -> None:
    for value in ([True], [1, "1"], [1.0, None], [[1]], [float("inf")], [float("nan"), 1], "12", {"1": 1}, None, 5):
        assert as_token_ids(value) is None
    assert as_token_ids([]) == []
    assert list(map(type, as_token_ids([2.0, -0.0, 2**70]) or ())) == [int, int, int]


@pytest.mark.parametrize(
    ("body", "parts"),
    [
        (json.dumps({"prompt": [list(range(8000))] * 64}).encode(), 64),
        (json.dumps({"prompt": ["naïve 北京 👍\n" * 1000] * 100}).encode(), 100),
        (json.dumps({"messages": [{"role": "user", "content": "hi"}] * 5000}).encode(), 10_000),
    ],
    ids=["token ids", "texts", "messages"],
)
def test_others_have_their_turns_while_a_large_body_is_read(
    call: Call, body: bytes, parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However fast the machine is: every part gives a turn here."""
    turns = 0

    async def take_turn(self: Turns) -> None:
        nonlocal turns
        turns += 1
        await asyncio.sleep(0)

    monkeypatch.setattr(Turns, "over", True)
    monkeypatch.setattr(Turns, "next", take_turn)
    path = "/v1/chat/completions" if b'"messages"' in body else "/v1/completions"
    response = call.post(path, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert turns >= parts


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"prompt": "' + b"x" * 40_000, "not valid JSON"),
        (b'{"prompt": "' + b"x" * 40_000 + b'\\ud83d"}', "not valid JSON"),
        (b'{"prompt": ' + b"[" * 9000 + b"1" + b"]" * 9000 + b" " * 40_000 + b"}", "not valid JSON"),
        (b'["' + b"x" * 40_000 + b'"]', "must be a JSON object"),
    ],
    ids=["no end", "half a pair", "nesting", "no object"],
)
def test_a_large_body_is_told_what_is_wrong_with_it(call: Call, body: bytes, message: str) -> None:
    response = call.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"[" + b",".join([b"{}"] * MAX_CONTAINERS) + b"]",
        b"[" + b"[" * (MAX_CONTAINERS + 1) + b" " * json_body.PART_BYTES,
        b"[" + b",".join([b"1"] * (MAX_VALUES + 1)) + b"]",
        b'["' + b'","'.join([b"[]"] * (MAX_VALUES + 1)) + b'"]',
        b'{"a":' * (MAX_STRINGS + 2),
        b"{" + b",".join([rb'"a\\":1'] * (MAX_STRINGS + 1)) + b"}",
        # A string that never ends hides nothing before it.
        b"[" + b",".join([b"[]"] * MAX_CONTAINERS) + b'"' + b" " * json_body.PART_BYTES,
    ],
    ids=["objects", "nesting", "numbers", "strings", "names", "names with backslashes", "broken"],
)
def test_too_many_values_are_refused(body: bytes) -> None:
    with pytest.raises(ApiError, match="send fewer in one request"):
        read(body)


@pytest.mark.parametrize(
    "value",
    [
        "{[," * MAX_CONTAINERS,
        '\\" {[, "\\' * MAX_CONTAINERS,
        "," * (2 * MAX_VALUES),
        '"' * (3 * MAX_STRINGS),
        [["{" * 50, '"[', "\\"]] * (MAX_CONTAINERS // 4),
        list(range(64 * 8000)),
    ],
    ids=["code", "escapes", "commas", "quotes", "many strings", "token ids"],
)
def test_text_is_not_counted_and_long_prompts_pass(value: object) -> None:
    assert read(json.dumps({"prompt": value}).encode()) == {"prompt": value}


PART = json_body.PART_BYTES


@pytest.mark.parametrize(
    "text",
    [
        "é" * PART,
        "👍" * PART,
        "a👍é" * PART,
        "\\" * PART,
        'a"\\' * PART,
        "\\u00e9\\ud83d" * PART,
        "\n" * PART,
        "x" * 7 * PART,
    ],
)
@pytest.mark.parametrize("ascii_only", [False, True], ids=["plain", "escapes"])
@pytest.mark.parametrize("shift", range(13))
def test_long_texts_are_cut_between_signs(text: str, ascii_only: bool, shift: int) -> None:
    body = json.dumps({"prompt": shift * "-" + text}, ensure_ascii=ascii_only).encode()
    assert read(body) == {"prompt": shift * "-" + text}


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_no_part_of_a_large_body_is_long(monkeypatch: pytest.MonkeyPatch, depth: int) -> None:
    """Wherever in it the long text or list is."""
    lengths: list[int] = []

    def watched(text: bytes, **options: Any) -> Any:
        lengths.append(len(text))
        return from_json(text, **options)

    monkeypatch.setattr(json_body, "from_json", watched)
    value: Any = {
        "this and that": [1, "é\\\n" * PART, {"odd": [0.5] * 1000}],
        "text": "naïve 北京 👍\n" * PART,
        "ids": list(range(PART)),
        "odd": [1.5, None, True] * PART,
        "none": [],
    }
    for _ in range(depth // 2):
        value = {"content": [value]}
    body = json.dumps(value).encode()
    assert read(body) == value
    assert max(lengths) < PART + 32
    assert sum(lengths) > 0.9 * len(body)


@pytest.mark.parametrize(
    "ending", [b",", b",,1", b'"', b"x", b"[", b",01", b" 1 1", b"\xff"], ids=lambda ending: ending.decode("latin-1")
)
@pytest.mark.parametrize("numbers", [b"[1" + b", 2" * PART, b"[" + b" " * 2 * PART])
def test_what_is_wrong_in_a_long_list_of_numbers_is_refused(numbers: bytes, ending: bytes) -> None:
    body = b'{"prompt": ' + numbers + ending + b"]}"
    assert outcome(read_at_once, body) == outcome(read, body) == "refused"


@pytest.mark.parametrize("blanks", [0, PART])
def test_long_lists_of_next_to_nothing(blanks: int) -> None:
    assert read(b'{"a": [' + b" " * (PART + blanks) + b'], "b": [1' + b" " * PART + b"]}") == {"a": [], "b": [1]}


def test_a_text_that_is_no_utf_8_is_refused_as_soon_as_another() -> None:
    with pytest.raises(ValueError, match="prompt"):
        read(b'{"prompt": "' + b"\x80" * 8_000_000 + b'"}')


@pytest.mark.parametrize(
    "value", [{str(number): 1 for number in range(99_000)}, [1, "a"] * 50_000], ids=["object", "list"]
)
def test_what_cannot_be_taken_apart_is_refused_before_it_is_parsed(call: Call, value: object) -> None:
    response = call.complete(logit_bias=value)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "logit_bias"
    assert "more than 20000 values" in response.json()["error"]["message"]


def test_a_body_of_very_many_fields_is_refused(call: Call) -> None:
    response = call.complete(**{f"field{number}": 1 for number in range(json_body.MAX_VALUES_AT_ONCE + 1)})
    assert response.status_code == 400
    assert "more than 20000 values" in response.json()["error"]["message"]


def test_what_is_ignored_is_not_parsed(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[bytes] = []
    monkeypatch.setattr(json_body, "_parse", lambda text: (parsed.append(text), from_json(text))[1])
    large = ["{}", 1, 2.5] * PART
    body = {"prompt": "x" * 100, "max_tokens": 2, "metadata": large, "of_the_future": {"a": large}}
    assert call.post("/v1/completions", body).status_code == 200
    assert sum(map(len, parsed)) < 1000
    assert call.post("/v1/completions", {**body, "use_beam_search": large}).status_code == 400


def test_what_is_counted() -> None:
    size = count_json(rb'{"a,[{": [1, 2, {"\"": "\\"}, ","]}')
    assert (size.containers, size.strings, size.commas) == (3, 4, 3)
    size = count_json(b'{"a": "no end [')
    assert (size.containers, size.strings, size.commas) == (1, 2, 0)


def test_a_route_says_so(call: Call, pool: EchoPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_size, "MAX_CONTAINERS", 100)
    response = call.chat(metadata=[{}] * json_body.PART_BYTES)
    assert response.status_code == 400
    assert "objects and lists" in response.json()["error"]["message"]
    assert pool.submitted == []
    assert call.chat(metadata=["{}"] * json_body.PART_BYTES).status_code == 200


def test_a_long_conversation_is_told_its_first_fault(call: Call) -> None:
    good, bad = {"role": "user", "content": "hello, here is some text"}, {"role": "nobody", "content": 1}
    for fields in ({}, {"temperature": "hot"}):
        answers = [
            call.post("/v1/chat/completions", {"messages": [good] * count + [bad] * 5, **fields}).json()
            for count in (2, 2000)
        ]
        params = [answer["error"]["param"] for answer in answers]
        assert params == (["temperature"] * 2 if fields else ["messages[2].role", "messages[2000].role"])
