"""What a frontend counts of its requests, by what became of them, and that a scrape shows all of the catalogue."""

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from echo_app import Call, EchoPool, LiveServer
from fastapi import FastAPI
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from services.frontend.generation import GenerationError
from services.frontend.http.app import create_app
from services.frontend.metrics.catalogue import CATALOGUE
from services.frontend.metrics.event_loop import EventLoopLag
from services.frontend.settings import FrontendSettings
from shared.metrics import PROCESS_METRICS

ROOT = Path(__file__).parents[4]
CHAT = {"gen_ai_operation_name": "chat", "gen_ai_provider_name": "tandem", "gen_ai_request_model": "echo"}
TRACE = "0af7651916cd43dd8448eb211c80319c"


def metric(call: Call, name: str, **labels: str) -> float:
    """The sum of the samples that have these labels."""
    families = text_string_to_metric_families(call.get("/metrics").text)
    samples = [sample for family in families for sample in family.samples if sample.name == name]
    return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())


def test_a_scrape_shows_the_whole_catalogue(call: Call) -> None:
    call.chat()
    families = {family.name: family for family in text_string_to_metric_families(call.get("/metrics").text)}
    listed = [metric.name for metric in CATALOGUE] + [*PROCESS_METRICS]
    assert set(families) == {name.removesuffix("_total") for name in listed}
    for each in CATALOGUE:
        family = families[each.name.removesuffix("_total")]
        assert family.type == each.kind
        assert all(set(sample.labels) - {"le"} == set(each.labels) for sample in family.samples), each.name
    # Whoever alerts on a rate needs a series before the first of its kind happens.
    assert families["tandem_frontend_failovers"].samples
    assert families["tandem_frontend_rejections"].samples


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_and_times_of_requests_that_succeed(call: Call, stream: bool) -> None:
    began = time.perf_counter()
    for _ in range(3):
        call.chat("hello", n=2, max_tokens=5, stream=stream)
    seconds = time.perf_counter() - began
    usage = call.chat("hello", n=2, max_tokens=5).json()["usage"]
    for kind, name in (("input", "prompt_tokens"), ("output", "completion_tokens")):
        labels = {**CHAT, "gen_ai_token_type": kind}
        assert metric(call, "gen_ai_server_token_usage_count", **labels) == 4
        assert metric(call, "gen_ai_server_token_usage_sum", **labels) == 4 * usage[name]
    assert metric(call, "gen_ai_server_request_duration_seconds_count", **CHAT, error_type="") == 4
    assert metric(call, "gen_ai_server_time_to_first_token_seconds_count", **CHAT) == 4
    assert metric(call, "gen_ai_server_time_per_output_token_seconds_count", **CHAT) == 8
    duration = metric(call, "gen_ai_server_request_duration_seconds_sum", **CHAT)
    first_token = metric(call, "gen_ai_server_time_to_first_token_seconds_sum", **CHAT)
    assert 0 < first_token <= duration < seconds + 60
    assert metric(call, "tandem_frontend_cached_tokens_total", model="echo") == 4 * 3
    assert metric(call, "tandem_frontend_template_seconds_count", model="echo") == 4
    assert metric(call, "tandem_frontend_tokenize_seconds_count", model="echo") == 4


def test_a_model_is_counted_under_the_name_that_was_asked_for(call: Call) -> None:
    call.chat(model="echo/alias")
    call.chat(model="made-up")
    call.complete()
    labels = {**CHAT, "gen_ai_request_model": "echo/alias"}
    assert metric(call, "gen_ai_server_request_duration_seconds_count", **labels) == 1
    assert metric(call, "gen_ai_server_request_duration_seconds_count") == 2
    assert metric(call, "gen_ai_server_token_usage_count", gen_ai_operation_name="text_completion") == 2
    assert "made-up" not in call.get("/metrics").text


def rejections(call: Call) -> dict[str, float]:
    families = text_string_to_metric_families(call.get("/metrics").text)
    (family,) = (each for each in families if each.name == "tandem_frontend_rejections")
    return {sample.labels["reason"]: sample.value for sample in family.samples if sample.value}


REFUSALS: dict[str, dict[str, Any]] = {
    "server_limit": {"error": GenerationError("full", 429, reason="server_limit")},
    "engines_full": {"error": GenerationError("full", 429)},
    "no_engine": {"error": GenerationError("none", 503)},
    "draining": {"error": GenerationError("leaving", 503, reason="draining")},
    "failed": {"error": GenerationError("broken", 500)},
}


@pytest.mark.parametrize("reason", REFUSALS)
@pytest.mark.parametrize("stream", [False, True])
def test_refusals_of_the_engines_are_told_apart(call: Call, pool: EchoPool, reason: str, stream: bool) -> None:
    pool.refuse = REFUSALS[reason]["error"]
    assert call.chat(stream=stream).status_code >= 400
    assert rejections(call) == {reason: 1}
    assert metric(call, "gen_ai_server_request_duration_seconds_count", **CHAT, error_type=reason) == 1
    assert metric(call, "gen_ai_server_time_to_first_token_seconds_count") == 0


def test_refusals_at_the_door_are_told_apart(make_model: Callable[..., Any]) -> None:
    settings = FrontendSettings(model="echo", api_key=["k"], max_requests_per_key=1, max_body_bytes=1024)
    app = create_app(settings, [make_model()])
    call = Call(app)
    headers = {"authorization": "Bearer k"}
    call.chat()
    call.post("/v1/completions", {"prompt": "a" * 2000}, headers=headers)
    call.post("/v1/completions", {"prompt": "a", "temperature": -1}, headers=headers)
    call.post("/v1/completions", {"prompt": "a", "model": "no"}, headers=headers)
    call.post("/nothing", {}, headers=headers)
    call.get("/v1/completions", headers=headers)
    with app.state.frontend.preparing():
        app.state.frontend._preparing = 10_000
        call.post("/v1/completions", {"prompt": "a"}, headers=headers)
        app.state.frontend._preparing = 1
    expected = {"unauthorized": 1, "too_large": 1, "invalid": 2, "not_found": 2, "server_limit": 1}
    assert rejections(call) == expected


def test_streams_that_fail_after_they_began(call: Call, pool: EchoPool) -> None:
    pool.fail_after = 2
    assert call.chat(stream=True).status_code == 200
    assert rejections(call) == {}
    assert metric(call, "tandem_frontend_stream_errors_total", reason="failed") == 1
    assert metric(call, "gen_ai_server_request_duration_seconds_count", **CHAT, error_type="failed") == 1
    assert metric(call, "gen_ai_server_time_to_first_token_seconds_count") == 0


@pytest.mark.parametrize(
    ("stream", "hold_after", "phase"), [(True, 2, "streaming"), (True, 0, "waiting"), (False, 2, "waiting")]
)
def test_clients_that_leave(
    live: LiveServer, app: FastAPI, pool: EchoPool, stream: bool, hold_after: int, phase: str
) -> None:
    pool.hold_after = hold_after
    body = b'{"messages":[{"role":"user","content":"hello"}],"stream":%b}' % (b"true" if stream else b"false")
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: t\r\nContent-Length: {len(body)}\r\n"
    head += "Content-Type: application/json\r\n\r\n"
    with socket.create_connection(("127.0.0.1", live.port), timeout=20) as connection:
        connection.sendall(head.encode() + body)
        until(lambda: sum(pool.delivered.values()) == hold_after and bool(pool.running))
        if phase == "streaming":
            assert connection.recv(1)
    until(lambda: not pool.running)
    call = Call(app)
    until(lambda: metric(call, "tandem_frontend_disconnects_total", reason=phase) == 1)
    assert metric(call, "tandem_frontend_disconnects_total") == 1
    assert metric(call, "gen_ai_server_request_duration_seconds_count", **CHAT, error_type="client_left") == 1
    assert metric(call, "tandem_frontend_streams_in_flight") == 0


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it never came to be"
        time.sleep(0.005)


@pytest.mark.parametrize("sampled", [True, False])
def test_a_sampled_trace_is_an_exemplar_for_scrapers_that_take_them(call: Call, sampled: bool) -> None:
    traceparent = f"00-{TRACE}-b7ad6b7169203331-{sampled:02x}"
    call.post(
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "hello"}]},
        headers={"traceparent": traceparent},
    )
    response = call.get("/metrics", headers={"accept": "application/openmetrics-text;version=1.0.0"})
    assert response.headers["content-type"].startswith("application/openmetrics-text")
    families = parse_openmetrics(response.text)
    found = {family.name: sample.exemplar for family in families for sample in family.samples if sample.exemplar}
    names = ("time_to_first_token_seconds", "time_per_output_token_seconds", "request_duration_seconds")
    assert set(found) == ({f"gen_ai_server_{name}" for name in names} if sampled else set())
    assert all(exemplar.labels == {"trace_id": TRACE} for exemplar in found.values())
    assert TRACE not in call.get("/metrics").text


def test_a_held_up_event_loop_is_seen() -> None:
    async def run() -> EventLoopLag:
        lag = EventLoopLag()
        with lag.watched():
            await asyncio.sleep(0)
            time.sleep(0.5)  # noqa: ASYNC251
            while not lag.seconds.count:
                await asyncio.sleep(0.001)
        return lag

    lag = asyncio.run(run())
    assert lag.seconds.total >= 0.3


PROCESS = """
import os, sys
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from services.frontend.metrics import catalogue
from services.frontend.metrics.shared_values import SharedValues
from shared.metrics import exposition

values = SharedValues(os.environ["PROMETHEUS_MULTIPROC_DIR"])
lag = catalogue.EVENT_LOOP_LAG.distribution()
own = {
    catalogue.WORKERS: {(): 1},
    catalogue.ENGINES_READY: {("m",): int(sys.argv[1])},
    catalogue.POOL_REQUESTS_WAITING: {("m",): int(sys.argv[1])},
    catalogue.HANDOVERS: {("m",): 5},
    catalogue.EVENT_LOOP_LAG: {(): lag},
}
values.write(own)
lag.observe(0.002)
lag.observe_traced(0.2, "t", 1.0)
values.write(own)
print("ready", flush=True)
sys.stdin.readline()
text = exposition(values.read(catalogue.CATALOGUE, own), "application/openmetrics-text;version=1.0.0")[0].decode()
for family in text_string_to_metric_families(text):
    for sample in family.samples:
        if sample.value or sample.exemplar:
            print(sample.name, sample.labels.get("le", ""), sample.value, bool(sample.exemplar))
sys.stdin.readline()
"""


def test_several_processes_add_up(tmp_path: Path) -> None:
    variables = {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(number)],
            env=variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in (3, 2)
    ]
    try:
        for process in processes:
            assert process.stdout
            assert process.stdout.readline() == "ready\n"
        shown, _ = processes[0].communicate("\n\n", timeout=60)
        lines = {tuple(line.split()) for line in shown.splitlines()}
        assert ("tandem_frontend_workers", "2.0", "False") in lines
        assert ("tandem_frontend_engines_ready", "2.0", "False") in lines  # the least
        assert ("tandem_frontend_pool_requests_waiting", "3.0", "False") in lines  # the most
        assert ("tandem_frontend_handovers_total", "10.0", "False") in lines
        name = "tandem_frontend_event_loop_lag_seconds"
        assert (f"{name}_count", "4.0", "False") in lines
        assert (f"{name}_bucket", "0.0025", "2.0", "False") in lines
        assert (f"{name}_bucket", "0.25", "4.0", "True") in lines
    finally:
        for process in processes:
            process.kill()
            process.communicate()
