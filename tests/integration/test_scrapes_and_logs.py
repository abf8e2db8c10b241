"""What both services tell of a load: every figure of their metrics beside what the clients counted, and their logs."""

import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from process_fleet import ROOT, Member, ProcessFleet, wait_until
from prometheus_client.core import Metric as Family
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

KEY = "sk-the-key-that-no-log-may-show"
WRONG_KEY = "sk-a-wrong-key-that-no-log-may-show"
SECRET = "xylophone-the-prompt-that-no-log-may-show"
CLIENTS = 8
REQUESTS_EACH = 4
CHAT = {"gen_ai_operation_name": "chat", "gen_ai_request_model": "m"}


@pytest.fixture(scope="module")
def fleet(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessFleet]:
    """The first frontend logs as it does by default, the second and the engines all that they can."""
    fleet = ProcessFleet(
        tmp_path_factory.mktemp("fleet"),
        smollm2,
        num_frontends=2,
        num_engines=2,
        frontend={"api_key": [KEY]},
        engine={"log_level": "debug", "simulated_step_ms": 5},
    )
    fleet.frontends[1].settings["log_level"] = "debug"
    try:
        fleet.start()
        yield fleet
    finally:
        fleet.close()


@dataclass
class Answered:
    """What a client saw of one request."""

    request_id: str
    trace_id: str
    usage: dict[str, Any]
    seconds: float
    first_token: float
    finish_reasons: list[str]


def stream(client: httpx.Client, number: int, n: int) -> Answered:
    trace_id = f"{number + 1:032x}"
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": f"{SECRET} " + "tell me of whales. " * (number % 5 * 8)}],
        "n": n,
        "max_tokens": 5 + number % 20,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began = time.perf_counter()
    first = 0.0
    events: list[dict[str, Any]] = []
    headers = {"traceparent": f"00-{trace_id}-00000000000000ab-01"}
    with client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            first = first or time.perf_counter() - began
            if line.startswith("data: {"):
                events.append(json.loads(line.removeprefix("data: ")))
    reasons = [choice["finish_reason"] for event in events for choice in event["choices"] if choice["finish_reason"]]
    assert len(reasons) == n
    seconds = time.perf_counter() - began
    return Answered(response.headers["x-request-id"], trace_id, events[-1]["usage"], seconds, first, reasons)


class Scrape:
    """One member's metrics at one moment."""

    def __init__(self, member: Member) -> None:
        self.families: dict[str, Family] = {
            each.name: each for each in text_string_to_metric_families(member.get("/metrics")[1])
        }

    def __call__(self, name: str, **labels: str) -> float:
        """The sum of the samples of that name which have these labels."""
        found = [
            sample.value
            for family in self.families.values()
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]
        assert found, f"{name} {labels} is not there"
        return sum(found)


def client_of(fleet: ProcessFleet, number: int = 0, key: str = KEY) -> httpx.Client:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.Client(base_url=f"http://127.0.0.1:{fleet.frontends[number].port}", headers=headers, timeout=120)


def leave_midway(fleet: ProcessFleet) -> None:
    body = {"model": "m", "prompt": SECRET, "max_tokens": 2000, "ignore_eos": True, "stream": True}
    with client_of(fleet) as client, client.stream("POST", "/v1/completions", json=body) as response:
        next(response.iter_lines())


@pytest.fixture(scope="module")
def load(fleet: ProcessFleet) -> tuple[list[Answered], dict[str, list[float]]]:
    """The clients' answers, and what was seen of some gauges meanwhile."""

    def run_client(number: int) -> list[Answered]:
        with client_of(fleet) as client:
            return [stream(client, number * REQUESTS_EACH + each, 1 + each % 2) for each in range(REQUESTS_EACH)]

    seen: dict[str, list[float]] = {}
    frontend, engines = fleet.frontends[0], fleet.engines
    with ThreadPoolExecutor(CLIENTS) as threads:
        running = [threads.submit(run_client, number) for number in range(CLIENTS)]
        while not all(each.done() for each in running):
            scrape = Scrape(frontend)
            for name in ("streams_in_flight", "generations_in_flight", "pool_requests_running", "pool_kv_usage_ratio"):
                seen.setdefault(name, []).append(scrape(f"tandem_frontend_{name}"))
            scrapes = [Scrape(engine) for engine in engines]
            for name in ("requests_running", "kv_usage_ratio"):
                seen.setdefault(name, []).append(sum(each(f"tandem_engine_{name}") for each in scrapes))
        answered = [answer for each in running for answer in each.result()]
    with client_of(fleet) as client:
        assert client.post("/v1/completions", json={"model": "m", "prompt": "a", "temperature": -1}).status_code == 400
    with client_of(fleet, key=WRONG_KEY) as client:
        assert client.post("/v1/completions", json={"model": "m", "prompt": SECRET}).status_code == 401
    leave_midway(fleet)
    fleet.assert_nothing_left()
    return answered, seen


def test_the_frontends_figures_are_the_clients(fleet: ProcessFleet, load: tuple[list[Answered], Any]) -> None:
    answered, seen = load
    scrape = Scrape(fleet.frontends[0])
    count, choices = len(answered), sum(len(each.finish_reasons) for each in answered)
    route = "/v1/chat/completions"
    assert scrape("tandem_frontend_requests_total", route=route, status="200") == count
    assert scrape("tandem_frontend_rejections_total", reason="invalid") == 1
    assert scrape("tandem_frontend_rejections_total", reason="unauthorized") == 1
    assert scrape("tandem_frontend_rejections_total") == 2
    assert scrape("tandem_frontend_disconnects_total", reason="streaming") == 1
    assert scrape("tandem_frontend_stream_errors_total") == 0
    for kind, name in (("input", "prompt_tokens"), ("output", "completion_tokens")):
        expected = sum(each.usage[name] for each in answered)
        assert scrape("gen_ai_server_token_usage_sum", **CHAT, gen_ai_token_type=kind) == expected
        assert scrape("gen_ai_server_token_usage_count", **CHAT, gen_ai_token_type=kind) == count
    cached = sum(each.usage["prompt_tokens_details"]["cached_tokens"] for each in answered)
    assert cached > 0
    assert scrape("tandem_frontend_cached_tokens_total", model="m") >= cached
    assert scrape("gen_ai_server_request_duration_seconds_count", **CHAT, error_type="") == count
    assert scrape("gen_ai_server_request_duration_seconds_count", error_type="client_left") == 1
    # The server has a token before the client has, and may take note of an answer's end after it.
    duration = scrape("gen_ai_server_request_duration_seconds_sum", **CHAT)
    first_token = scrape("gen_ai_server_time_to_first_token_seconds_sum", **CHAT)
    assert 0 < first_token <= min(duration, sum(each.first_token for each in answered))
    assert duration <= sum(each.seconds + 5 for each in answered)
    assert scrape("gen_ai_server_time_to_first_token_seconds_count", **CHAT) == count
    assert scrape("gen_ai_server_time_per_output_token_seconds_count", **CHAT) == choices
    # A step takes 5 ms at least.
    assert scrape("gen_ai_server_time_per_output_token_seconds_sum", **CHAT) >= 0.004 * choices
    assert scrape("tandem_frontend_template_seconds_count", model="m") == count
    assert scrape("tandem_frontend_tokenize_seconds_count", model="m") >= count + 1
    assert scrape("tandem_frontend_detokenize_seconds_count", model="m") > 0
    assert scrape("tandem_frontend_event_loop_lag_seconds_count") > 0
    # A client may have its answer's end, and ask anew, before the server has put the answer away.
    assert 1 <= max(seen["streams_in_flight"]) <= 2 * CLIENTS
    assert 1 <= max(seen["generations_in_flight"]) <= 2 * CLIENTS
    assert max(seen["pool_requests_running"]) >= 1
    assert 0 < max(seen["pool_kv_usage_ratio"]) <= 1
    assert scrape("tandem_frontend_engines", state="ready") == scrape("tandem_frontend_engines_ready") == 2


def test_the_engines_figures_are_the_clients(fleet: ProcessFleet, load: tuple[list[Answered], Any]) -> None:
    answered, seen = load
    scrapes = [Scrape(engine) for engine in fleet.engines]

    def total(name: str, **labels: str) -> float:
        return sum(scrape(f"tandem_engine_{name}", **labels) for scrape in scrapes)

    reasons = [reason for each in answered for reason in each.finish_reasons]
    for reason in ("stop", "length"):
        assert total("requests_finished_total", reason=reason) == reasons.count(reason)
    assert total("requests_finished_total", reason="abort") == 1  # the client that left
    assert total("requests_received_total") == len(reasons) + 1
    assert total("requests_refused_total") == 0
    assert total("queue_seconds_count") == total("prefill_seconds_count") == len(reasons) + 1
    assert total("generated_tokens_total") > sum(each.usage["completion_tokens"] for each in answered)
    # Usage counts a prompt once, however many choices it has.
    prompts = sum(each.usage["prompt_tokens"] * len(each.finish_reasons) for each in answered)
    assert prompts < total("prompt_tokens_total") < prompts + 100
    assert total("prefix_hit_tokens_total") == total("cached_tokens_total")
    assert total("prefix_queried_tokens_total") == total("prompt_tokens_total")
    steps = total("step_seconds_count")
    assert steps >= 5
    for phase in ("schedule", "forward", "sample", "output"):
        assert total("step_phase_seconds_count", phase=phase) == total("batch_requests_count")
    assert total("step_phase_seconds_sum", phase="forward") >= 0.004 * total("batch_requests_count")
    assert total("step_phase_seconds_count", phase="send") > 0
    assert max(seen["requests_running"]) >= 1
    assert 0 < max(seen["kv_usage_ratio"]) <= 2
    for gauge in ("requests_running", "requests_waiting", "requests_preparing", "waiting_tokens", "kv_usage_ratio"):
        assert total(gauge) == 0, gauge
    assert total("link_backlog_bytes") == 0
    assert total("kv_blocks_cached") > 0


def test_both_ends_of_the_link_count_the_same(fleet: ProcessFleet, load: Any) -> None:
    def counts(members: list[Any], prefix: str, direction: str) -> tuple[float, float]:
        scrapes = [Scrape(member) for member in members]
        messages = sum(scrape(f"{prefix}_link_messages_total", direction=direction) for scrape in scrapes)
        return messages, sum(scrape(f"{prefix}_link_bytes_total", direction=direction) for scrape in scrapes)

    for sender, receiver in (("frontend", "engine"), ("engine", "frontend")):
        members: dict[str, list[Any]] = {"frontend": fleet.frontends, "engine": fleet.engines}

        def agree(sender: str = sender, receiver: str = receiver, members: Any = members) -> bool:
            # Heartbeats go on meanwhile: what was received lies between what was sent before and after.
            before = counts(members[sender], f"tandem_{sender}", "out")
            received = counts(members[receiver], f"tandem_{receiver}", "in")
            after = counts(members[sender], f"tandem_{sender}", "out")
            return all(low <= got <= high for low, got, high in zip(before, received, after, strict=True))

        wait_until(agree, f"what a {sender} sent a {receiver} received")


def test_real_processes_expose_what_the_page_lists(fleet: ProcessFleet, load: Any) -> None:
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (counter|gauge|histogram) \|[^|]*\| ([^|]*) \|", page, re.MULTILINE)
    for kind, members in (("frontend", fleet.frontends), ("engine", fleet.engines)):
        listed = {
            name: (type_, set(re.findall(r"`(\w+)`", labels)))
            for name, type_, labels in rows
            if name.startswith(f"tandem_{kind}_") or (kind == "frontend" and name.startswith("gen_ai_"))
        }
        assert len(listed) > 20
        for member in members:
            families = {
                name: family for name, family in Scrape(member).families.items() if not name.startswith("process_")
            }
            assert set(families) == {name.removesuffix("_total") for name in listed}
            for name, (type_, labels) in listed.items():
                family = families[name.removesuffix("_total")]
                assert family.type == type_, name
                for sample in family.samples:
                    assert set(sample.labels) - {"le"} == labels, name


def test_sampled_traces_are_exemplars(fleet: ProcessFleet, load: tuple[list[Answered], Any]) -> None:
    port = fleet.frontends[0].port
    accept = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3"
    text = httpx.get(f"http://127.0.0.1:{port}/metrics", headers={"accept": accept}).text
    exemplars = [sample.exemplar for family in parse_openmetrics(text) for sample in family.samples if sample.exemplar]
    assert exemplars
    assert {each.labels["trace_id"] for each in exemplars} <= {answer.trace_id for answer in load[0]}
    for engine in fleet.engines:
        text = httpx.get(f"http://127.0.0.1:{engine.probe_port}/metrics", headers={"accept": accept}).text
        assert list(parse_openmetrics(text))


def lines(member: Member) -> list[dict[str, Any]]:
    """Every line of its log; all of them are JSON."""
    return [json.loads(line) for line in member.log.splitlines()]


def test_one_access_line_a_request_says_what_the_client_saw(
    fleet: ProcessFleet, load: tuple[list[Answered], Any]
) -> None:
    access = [line for line in lines(fleet.frontends[0]) if line["logger"] == "tandem.access"]
    by_id = {line["request_id"]: line for line in access}
    assert len(by_id) == len(access) == len(load[0]) + 3  # without probes and scrapes
    for answer in load[0]:
        line = by_id[answer.request_id]
        assert line["message"] == "POST /v1/chat/completions 200"
        assert line["trace_id"] == answer.trace_id
        assert line["model"] == "m"
        usage = answer.usage
        assert (line["prompt_tokens"], line["completion_tokens"]) == (
            usage["prompt_tokens"],
            usage["completion_tokens"],
        )
        assert line["cached_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]
        assert 0 < line["time_to_first_token"] <= min(line["duration"], answer.first_token)
        assert line["finish_reasons"] == answer.finish_reasons
        assert "error" not in line
    failures = sorted((line["message"], line.get("error"), line.get("client_left")) for line in access)
    assert ("POST /v1/completions 200", None, "streaming") in failures
    assert ("POST /v1/completions 400", "invalid", None) in failures
    assert ("POST /v1/completions 401", "unauthorized", None) in failures


def test_no_log_shows_a_prompt_or_a_key(fleet: ProcessFleet, load: Any) -> None:
    bodies: list[bytes] = [
        json.dumps({"model": "m", "messages": [{"role": "user", "content": SECRET}], **more}).encode()
        for more in (
            {"max_tokens": 3},
            {"max_tokens": 3, "stream": True, "logprobs": True, "stop": [SECRET]},
            {"max_tokens": -1},
            {"max_tokens": SECRET},
            {"model": SECRET},
            {"temperature": {"a": SECRET}},
            {"chat_template_kwargs": {"tools": SECRET}},
            {"messages": [{"role": SECRET, "content": SECRET}]},
            {"messages": [{"role": "user", "content": "\ud800" + SECRET}]},
            {"messages": [{"role": "user", "content": (SECRET + " ") * 20_000}]},
        )
    ]
    bodies += [
        b'{"messages": [{"role": "user", "content": "' + SECRET.encode(),
        SECRET.encode(),
        b'"%b"' % SECRET.encode(),
    ]
    for number in range(2):
        with client_of(fleet, number) as client, client_of(fleet, number, WRONG_KEY) as stranger:
            for body in bodies:
                for path in ("/v1/chat/completions", "/v1/completions", "/tokenize"):
                    for sender in (client, stranger):
                        sender.post(path, content=body, headers={"content-type": "application/json"})
            client.get(f"/v1/models?key={KEY}&prompt={SECRET}")
            client.get("/v1/models", headers={"x-api-key": KEY, "cookie": SECRET})
    fleet.assert_nothing_left()
    assert any("/metrics" in line["message"] for line in lines(fleet.frontends[1]))  # at debug
    for member in fleet.members:
        assert lines(member)
        for secret in (KEY, WRONG_KEY, SECRET, SECRET[:12]):
            assert secret not in member.log, f"{member.log_file.name} holds {secret}"
