"""Bodies that are wrong in every way hypothesis thinks of: an answer of 200 or 4xx, never 5xx, and no hang."""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from echo_app import Call, EchoPool
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.frontend.http.app import create_app
from services.frontend.http.loaded_model import LoadedModel
from services.frontend.http.schemas.chat import ChatCompletionRequest
from services.frontend.http.schemas.completion import CompletionRequest
from services.frontend.http.schemas.responses import ErrorResponse
from services.frontend.http.schemas.tokenization import DetokenizeRequest, TokenizeRequest
from services.frontend.prompts.chat_template import ChatTemplate
from services.frontend.settings import FrontendSettings
from services.frontend.tokenizer import Tokenizer

ROUTES = {
    "/v1/chat/completions": ChatCompletionRequest,
    "/v1/completions": CompletionRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
BASE: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3},
    "/v1/completions": {"prompt": "hi", "max_tokens": 3},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [1]},
}

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-3, 300)
    | st.sampled_from([2**31, 2**63, -(2**63) - 1, 10**30, 10**400])
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["", "user", "text", "auto", "none", "<|end|>", "\ud800", "\x00", "echo"])
)
keys = st.text(max_size=5) | st.sampled_from(
    ["role", "content", "type", "text", "function", "name", "include_usage", "5"]
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4), max_leaves=12
)


@pytest.fixture(scope="module")
def pool(tokenizer: Tokenizer) -> EchoPool:
    return EchoPool(tokenizer)


@pytest.fixture(scope="module")
def call(tokenizer: Tokenizer, pool: EchoPool, tokenizer_folder: Path):
    with ThreadPoolExecutor(1) as executor:
        model = LoadedModel(["echo"], "echo", tokenizer, ChatTemplate(tokenizer.hf), pool, executor, "qwen3")
        call = Call(create_app(FrontendSettings(model="echo"), [model]))
        yield call
        call.close()


def check(call: Call, pool: EchoPool, path: str, body: bytes) -> None:
    response = call.run(
        asyncio.wait_for(call.send("POST", path, content=body, headers={"content-type": "application/json"}), 20)
    )
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code != 200:
        ErrorResponse.model_validate_json(response.content)
    response.content.decode()
    assert not pool.running


@pytest.mark.parametrize("path", ROUTES)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_wrong_values(call: Call, pool: EchoPool, path, data):
    # A timeout of a few milliseconds is valid, and rightly answered 504.
    names = st.sampled_from([*sorted(set(ROUTES[path].model_fields) - {"timeout"}), *ROUTES[path].unsupported])
    fields = data.draw(st.dictionaries(names, values, min_size=1, max_size=3))
    check(call, pool, path, json.dumps(BASE[path] | fields).encode())


@pytest.mark.parametrize("path", ROUTES)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_broken_bytes(call: Call, pool: EchoPool, path, data):
    body = bytearray(json.dumps(BASE[path]).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(body)))
        body[position : position + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=3))
    check(call, pool, path, bytes(body))
