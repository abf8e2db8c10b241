"""Requests that leave a sampling field out get the model's own; those that set it, even to the usual, get theirs."""

import pytest
from echo_app import Call, EchoPool

from services.frontend.generation_config import SamplingDefaults
from services.frontend.http.app import create_app

DEFAULTS = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1}
USUAL = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}


@pytest.fixture
def call(settings, make_model) -> Call:
    return Call(create_app(settings, [make_model(defaults=SamplingDefaults(**DEFAULTS, max_new_tokens=7))]))


def sent(pool: EchoPool) -> dict[str, float]:
    return {name: getattr(pool.submitted[-1].sampling, name) for name in DEFAULTS}


@pytest.mark.parametrize("ask", [Call.chat, Call.complete])
def test_the_models_defaults(call: Call, pool: EchoPool, ask):
    assert ask(call).status_code == 200
    assert sent(pool) == DEFAULTS
    assert ask(call, **dict.fromkeys(DEFAULTS)).status_code == 200
    assert sent(pool) == DEFAULTS
    assert ask(call, **USUAL).status_code == 200
    assert sent(pool) == USUAL


@pytest.mark.parametrize(("asked", "given"), [(None, 7), (3, 3), (7, 7), (100, 7)])
def test_max_new_tokens_is_a_limit(call: Call, pool: EchoPool, asked, given):
    for ask in (call.chat, call.complete):
        assert ask(max_tokens=asked).json()["usage"]["completion_tokens"] <= given
        assert pool.submitted[-1].sampling.max_tokens == given
