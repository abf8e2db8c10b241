"""schemathesis against the live server: its OpenAPI document tells the truth, and nothing it thinks of brings a 5xx."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
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
    ("GET", "/health"),
    ("GET", "/health/live"),
    ("GET", "/health/ready"),
    ("GET", "/version"),
]
# A small context, so that no answer is long.
FLAGS = ("--executor", "simulated", "--max-model-len", "128", "--max-n", "4")


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
    @given(case=operation.as_strategy(generation_mode=mode))
    def holds(case: schemathesis.Case) -> None:
        if mode is GenerationMode.POSITIVE and isinstance(case.body, dict):
            case.body.pop("timeout", None)  # one of a nanosecond is valid, and rightly a 504
        # What a schema cannot say, such as that min_tokens is at most max_tokens, is refused all the same.
        response = case.call_and_validate(excluded_checks=[positive_data_acceptance], timeout=30)
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
    assert statuses[404 if path.endswith("{model_id}") else 200], statuses


@pytest.mark.parametrize(("method", "path"), [operation for operation in OPERATIONS if operation[0] == "POST"])
def test_what_the_document_rules_out(
    server: ServerProcess, document: schemathesis.BaseSchema, method: str, path: str
) -> None:
    statuses = check(server, document[path][method], GenerationMode.NEGATIVE, 30)
    assert statuses[400] >= 15, statuses
