"""One look at the frontends: what is added up, and what is said of those that do not answer."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from services.top.reading import Frontends, Reading

ENGINE = {
    "model": "m",
    "address": "10.0.0.1:5555",
    "state": "ready",
    "running_requests": 3,
    "waiting_requests": 1,
    "kv_blocks_free": 25,
    "kv_blocks_total": 100,
    "tokens_per_second": 50.0,
    "told_by_a_newer_frontend": [1],
}
METRICS = """\
# TYPE tandem_frontend_requests_total counter
tandem_frontend_requests_total{route="/v1/completions",status="200"} 5
tandem_frontend_requests_total{route="/v1/completions",status="429"} 2
# TYPE tandem_frontend_requests_in_flight gauge
tandem_frontend_requests_in_flight 4
"""

Answer = Callable[[httpx.Request], httpx.Response]


def frontend(metrics: str = METRICS, **changes: Any) -> Answer:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/engines":
            return httpx.Response(200, content=json.dumps({"object": "list", "data": [ENGINE | changes]}))
        return httpx.Response(200, content=metrics)

    return answer


def read(*answers: Answer, api_key: str | None = None) -> Reading:
    async def main() -> Reading:
        def answer(request: httpx.Request) -> httpx.Response:
            return answers[int(request.url.host[1:])](request)

        frontends = Frontends([f"http://f{i}/" for i in range(len(answers))], api_key, httpx.MockTransport(answer))
        try:
            return await frontends.read()
        finally:
            await frontends.close()

    return asyncio.run(main())


def test_several_frontends_are_added_up_and_their_common_engines_counted_once() -> None:
    reading = read(frontend(), frontend(), frontend(address="10.0.0.2:5555"))
    assert [engine.address for engine in reading.engines] == ["10.0.0.1:5555", "10.0.0.2:5555"]
    assert reading.engines[0].kv_blocks_free == 25
    assert reading.num_answered == 3
    assert reading.total("tandem_frontend_requests_in_flight") == 12
    assert reading.by("tandem_frontend_requests_total", "status") == {"200": 15, "429": 6}
    assert reading.total("tandem_frontend_requests_total", status="429") == 6
    assert reading.problems == []


def test_the_key_is_sent() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.headers.get("authorization") != "Bearer key":
            return httpx.Response(401)
        return frontend()(request)

    assert read(answer, api_key="key").num_answered == 1
    assert "give --api-key" in read(answer).problems[0]


def refuse(request: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("Connection refused")


class Endless(httpx.AsyncByteStream):
    async def __aiter__(self) -> Any:
        while True:
            yield b" " * 2**20


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (refuse, "does not answer (Connection refused)"),
        (lambda request: httpx.Response(404), "answers 404: is that a Tandem frontend?"),
        (lambda request: httpx.Response(302, headers={"location": "http://elsewhere"}), "answers 302"),
        (lambda request: httpx.Response(200, content="<html>"), "not as a Tandem frontend does"),
        (lambda request: httpx.Response(200, content='{"data": [{"model": 5}]}'), "not as a Tandem frontend does"),
        (lambda request: httpx.Response(200, stream=Endless()), "without end"),
        (frontend(metrics='a{b="'), "not as a Tandem frontend does"),
        (frontend(metrics="a b c"), "not as a Tandem frontend does"),
    ],
)
def test_a_frontend_that_cannot_be_read_is_a_sentence_and_does_not_hide_the_others(
    answer: Answer, problem: str
) -> None:
    reading = read(answer, frontend())
    assert len(reading.problems) == 1
    assert problem in reading.problems[0]
    assert "http://f0" in reading.problems[0]
    assert reading.num_answered == 1
    assert len(reading.engines) == 1
