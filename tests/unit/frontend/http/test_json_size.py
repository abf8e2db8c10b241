"""Bodies of very many values are refused before they are parsed; what is only text is not counted."""

import asyncio
import json

import pytest
from echo_app import Call, EchoPool

from services.frontend.http import json_size
from services.frontend.http.errors import ApiError
from services.frontend.http.json_size import MAX_CONTAINERS, MAX_VALUES, check_json_size, count_outside_strings


@pytest.mark.parametrize(
    "body",
    [
        b"[" + b",".join([b"{}"] * MAX_CONTAINERS) + b"]",
        b"[" * (MAX_CONTAINERS + 1),
        b"[" + b",".join([b"1"] * (MAX_VALUES + 1)) + b"]",
        b'["' + b'","'.join([b"[]"] * (MAX_VALUES + 1)) + b'"]',
        # A string that never ends hides nothing before it.
        b"[" + b",".join([b"[]"] * MAX_CONTAINERS) + b'"',
    ],
    ids=["objects", "nesting", "numbers", "strings", "broken"],
)
def test_too_many_values_are_refused(body: bytes) -> None:
    with pytest.raises(ApiError) as refusal:
        asyncio.run(check_json_size(body))
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
    asyncio.run(check_json_size(json.dumps({"prompt": value}).encode()))


def test_what_is_counted() -> None:
    assert count_outside_strings(rb'{"a,[{": [1, 2, {"\"": "\\"}, ","]}') == (3, 3)
    assert count_outside_strings(b'{"a": "no end [') == (1, 0)
    assert count_outside_strings(b"") == (0, 0)


def test_a_route_says_so(call: Call, pool: EchoPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_size, "MAX_CONTAINERS", 100)
    monkeypatch.setattr(json_size, "_SMALL_BODY", 100)
    response = call.chat(metadata=[{}] * 100)
    assert response.status_code == 400
    assert "objects and lists" in response.json()["error"]["message"]
    assert pool.submitted == []
    assert call.chat(metadata=["{}"] * 100).status_code == 200
