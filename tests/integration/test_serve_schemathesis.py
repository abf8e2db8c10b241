"""schemathesis against the live server: its OpenAPI document tells the truth, and nothing it thinks of brings a 5xx."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance

from loadtest.server_process import ServerProcess, tandem_serve

OPERATIONS = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/{model_id}"),
    ("GET", "/engines"),
    ("GET", "/health"),
    ("GET", "/health/live"),
    ("GET", "/health/ready"),
    ("GET", "/version"),
]
# A small context, so that no answer is long.
KEY = "a-key-of-the-test"
FLAGS = ("--api-key", KEY, "--executor", "simulated", "--max-model-len", "128", "--max-n", "4")


@pytest.fixture(scope="module")
def server(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with tandem_serve(tmp_path_factory.mktemp("schemathesis"), *FLAGS) as server:
        yield server


@pytest.fixture(scope="module")
def document(server: ServerProcess) -> schemathesis.BaseSchema:
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


def test_every_route_of_the_document_is_tried(server: ServerProcess) -> None:
    paths = httpx.get(f"{server.url}/openapi.json").json()["paths"]
    assert sorted(OPERATIONS) == sorted((method.upper(), path) for path, item in paths.items() for method in item)


def fit(body: dict[str, Any]) -> None:
    """Have the body keep to what a schema cannot say: this vocabulary, this context, and one field beside another."""
    for name in (
        "model",
        "min_tokens",
        "max_tokens",
        "max_completion_tokens",
        "truncate_prompt_tokens",
        "top_logprobs",
    ):
        body.pop(name, None)
    for name in ("bad_words", "allowed_token_ids", "documents", "chat_template_kwargs", "continue_final_message"):
        body.pop(name, None)
    # What these hold is a language of its own, and this model's template takes no tools.
    for name in ("response_format", "structured_outputs", "tools", "tool_choice", "parallel_tool_calls"):
        body.pop(name, None)
    for name in [name for name in body if name.startswith("guided_")]:
        del body[name]
    for name in ("stop_token_ids", "tokens", "prompt"):
        if isinstance(body.get(name), list):
            body[name] = [in_vocabulary(item) for item in body[name]][:8]
    if body.get("logit_bias"):
        body["logit_bias"] = {str(number): bias for number, bias in enumerate(body["logit_bias"].values())}
    if body.get("n"):
        body["n"] = min(body["n"], 4)
    if body.get("stream"):
        body.pop("prompt_logprobs", None)
    if "messages" in body and "prompt" in body:
        del body["prompt"]
    if not body.get("messages") and body.get("prompt") is None and "tokens" not in body:
        body["prompt"] = "x"
    if body.get("prompt") == "":
        body["prompt"] = "x"
    for message in body.get("messages") or ():
        message["content"] = message.get("content") or "x"


def in_vocabulary(item: Any) -> Any:
    if isinstance(item, list):
        return [in_vocabulary(one) for one in item][:100]
    return item % 49_152 if isinstance(item, int | float) else item or "x"


def check(
    server: ServerProcess, operation: schemathesis.APIOperation, mode: GenerationMode, max_examples: int
) -> Counter[int]:
    """Every answer is one that the document knows. Returns the statuses that came."""
    statuses: Counter[int] = Counter()

    @settings(
        max_examples=max_examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode), fits=st.booleans())
    def holds(case: schemathesis.Case, fits: bool) -> None:
        if mode is GenerationMode.POSITIVE and isinstance(case.body, dict):
            case.body.pop("timeout", None)  # one of a nanosecond is valid, and rightly a 504
            if fits:
                fit(case.body)
        headers = {"Authorization": f"Bearer {KEY}"}
        # What a schema cannot say is refused all the same.
        response = case.call_and_validate(excluded_checks=[positive_data_acceptance], timeout=30, headers=headers)
        statuses[response.status_code] += 1

    holds()
    assert server.process.poll() is None
    assert "Traceback" not in server.log
    return statuses


@pytest.mark.parametrize(("method", "path"), OPERATIONS, ids=lambda value: value)
def test_what_the_document_allows(
    server: ServerProcess, document: schemathesis.BaseSchema, method: str, path: str
) -> None:
    statuses = check(server, document[path][method], GenerationMode.POSITIVE, 50 if method == "POST" else 10)
    assert statuses[404 if path.endswith("{model_id}") else 200] >= (5 if method == "POST" else 1), statuses


@pytest.mark.parametrize(("method", "path"), [operation for operation in OPERATIONS if operation[0] == "POST"])
def test_what_the_document_rules_out(
    server: ServerProcess, document: schemathesis.BaseSchema, method: str, path: str
) -> None:
    statuses = check(server, document[path][method], GenerationMode.NEGATIVE, 30)
    assert statuses[400] >= 5, statuses
