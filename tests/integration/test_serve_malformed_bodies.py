"""Ten thousand malformed bodies, several at once: each is refused with a 4xx, and the server goes on as before."""

import asyncio
import itertools
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from loadtest.server_process import ServerProcess, tandem_serve
from tests.integration.keep_alive_client import JSON, RawRequest, send_all
from tests.integration.malformed_bodies import BODIES, MalformedBodies

CONNECTIONS = 8
MAX_BODY_BYTES = 1 << 20


@pytest.fixture(scope="module")
def server(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    flags = ("--executor", "simulated", "--simulated-tokens", "echo", "--max-body-bytes", str(MAX_BODY_BYTES))
    with tandem_serve(tmp_path_factory.mktemp("malformed"), *flags) as server:
        yield server


def serves_as_before(server: ServerProcess) -> None:
    with httpx.Client(base_url=server.url) as client:
        for path, body in BODIES.items():
            assert client.post(path, json=body).status_code == 200
        answer = client.post("/v1/completions", json={"prompt": "still here", "max_tokens": 9}).json()
        assert answer["choices"][0]["text"] == "still here"
        assert client.get("/health/ready").status_code == 200
        assert "tandem_frontend_requests_in_flight 1.0" in client.get("/metrics").text


def test_ten_thousand_malformed_bodies_bring_only_4xx(server: ServerProcess) -> None:
    document = httpx.get(f"{server.url}/openapi.json").json()
    bodies = itertools.islice(MalformedBodies(document, seed=1), 10_000)
    answered = asyncio.run(send_all(server.port, bodies, CONNECTIONS))
    assert len(answered) == 10_000
    unrefused = [
        (request.path, answer.status, request.body[:300], answer.body[:300])
        for request, answer in answered
        if not 400 <= answer.status < 500
    ]
    assert unrefused == []
    statuses = Counter(answer.status for _, answer in answered)
    assert set(statuses) <= {400, 404, 413, 415}, statuses
    for _, answer in answered:
        error = json.loads(answer.body)["error"]
        assert isinstance(error["message"], str)
        assert error["message"]
        assert len(answer.body) < 4000
    serves_as_before(server)
    assert "Traceback" not in server.log


def test_a_body_over_the_limit_is_refused_and_its_connection_closed(server: ServerProcess) -> None:
    large = RawRequest("/v1/completions", b" " * (MAX_BODY_BYTES + 1), JSON)
    answered = asyncio.run(send_all(server.port, [large] * 4, connections=2))
    assert [answer.status for _, answer in answered] == [413] * 4
    serves_as_before(server)
