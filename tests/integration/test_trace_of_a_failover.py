"""The trace of a streamed chat whose engine is killed in the middle: what a receiver of OTLP gets of real processes."""

import json
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest
from process_fleet import Engine, ProcessFleet, wait_until

from tests.otlp_receiver import OtlpReceiver, ReceivedSpan, otlp_over_grpc, otlp_over_http

CLIENT_TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
CLIENT_SPAN = "00f067aa0ba902b7"
HTTP_SPAN = "POST /v1/chat/completions"
MAX_TOKENS = 80


@pytest.fixture(params=[otlp_over_http, otlp_over_grpc], ids=["http", "grpc"])
def receiver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[OtlpReceiver]:
    over: Callable[[], AbstractContextManager[OtlpReceiver]] = request.param
    with over() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{receiver.port}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc" if over is otlp_over_grpc else "http/protobuf")
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        yield receiver


@pytest.fixture
def fleet(receiver: OtlpReceiver, smollm2: Path, tmp_path: Path) -> Iterator[ProcessFleet]:
    engine = {"simulated_tokens": "echo", "max_num_batched_tokens": 64, "simulated_step_ms": 30}
    fleet = ProcessFleet(tmp_path, smollm2, num_frontends=1, num_engines=2, engine=engine)
    try:
        fleet.start()
        yield fleet
    finally:
        fleet.close()


class StreamingClient:
    """Streams one chat in a thread, as part of a trace of the client's own."""

    def __init__(self, port: int, body: dict[str, Any]) -> None:
        self.events: list[dict[str, Any]] = []
        self.done = False
        self._thread = threading.Thread(target=self._run, args=(port, body), daemon=True)
        self._thread.start()

    def _run(self, port: int, body: dict[str, Any]) -> None:
        headers = {"traceparent": f"00-{CLIENT_TRACE}-{CLIENT_SPAN}-01", "tracestate": "vendor=1"}
        url = f"http://127.0.0.1:{port}/v1/chat/completions"
        with httpx.stream("POST", url, json=body, headers=headers, timeout=120) as response:
            for line in response.iter_lines():
                data = line.removeprefix("data: ")
                if data == "[DONE]":
                    self.done = True
                elif line:
                    self.events.append(json.loads(data))

    def join(self) -> dict[str, Any]:
        """Its usage."""
        self._thread.join(120)
        assert self.done
        return next(event["usage"] for event in self.events if event.get("usage"))


def test_a_failover_is_one_tree_with_two_branches(fleet: ProcessFleet, receiver: OtlpReceiver) -> None:
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": " ".join(["one river two mountains three windows"] * 30)}],
        "max_tokens": MAX_TOKENS,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    client = StreamingClient(fleet.frontends[0].port, body)
    # The engine's spans of what is over by then are to be seen though it is killed.
    receiver.wait_for(CLIENT_TRACE, "queue", "prefill", "prefill")
    wait_until(lambda: len(client.events) > 10, "the stream is in its middle")
    first = engine_that_runs(fleet)
    first.kill()
    usage = client.join()
    assert usage["completion_tokens"] == MAX_TOKENS
    spans = receiver.wait_for(
        CLIENT_TRACE,
        HTTP_SPAN,
        "chat m",
        "route",
        "route",
        "generate",
        "generate",
        "queue",
        "queue",
        "decode",
        "stream",
    )
    check_tree(spans, usage)
    lost, finished = named(spans, "generate")
    assert lost.attributes["tandem.outcome"] == "lost"
    assert (lost.is_error, finished.is_error) == (True, False)
    assert finished.attributes["tandem.outcome"] == "finished"
    assert lost.attributes["server.port"] != finished.attributes["server.port"]
    check_branches(spans, lost, finished, usage)


def engine_that_runs(fleet: ProcessFleet) -> Engine:
    (engine,) = [engine for engine in fleet.engines if engine.metric("requests_running") > 0]
    return engine


def named(spans: list[ReceivedSpan], name: str) -> list[ReceivedSpan]:
    return [span for span in spans if span.name == name]


def check_tree(spans: list[ReceivedSpan], usage: dict[str, Any]) -> None:
    """Every parent, the frontend's order in time, and what the client was told."""
    by_id = {span.span_id: span for span in spans}
    assert len(by_id) == len(spans)
    (root,) = named(spans, HTTP_SPAN)
    (generation,) = named(spans, "chat m")
    assert (root.parent_id, root.kind, root.state) == (CLIENT_SPAN, "server", "vendor=1")
    parents = {
        "chat m": {HTTP_SPAN},
        "template": {"chat m"},
        "tokenize": {"chat m"},
        "route": {"chat m"},
        "generate": {"chat m"},
        "stream": {"chat m"},
        "queue": {"generate"},
        "prefill": {"generate"},
        "decode": {"generate"},
    }
    for span in spans:
        assert span.start <= span.end
        if span is not root:
            assert by_id[span.parent_id].name in parents[span.name], span
            assert span.start >= by_id[span.parent_id].start
            assert span.end <= root.end
    services = {span.name: span.resource["service.name"] for span in spans}
    engines = {"queue", "prefill", "decode"}
    assert services == {name: "tandem-engine" if name in engines else "tandem-frontend" for name in services}
    (template,), (tokenize,), (stream,) = named(spans, "template"), named(spans, "tokenize"), named(spans, "stream")
    first_route, second_route = named(spans, "route")
    lost, finished = named(spans, "generate")
    moments = [template.start, template.end, tokenize.start, tokenize.end, first_route.start, first_route.end]
    moments += [lost.start, lost.end, second_route.start, second_route.end, finished.start, finished.end]
    assert moments == sorted(moments)
    assert lost.start <= stream.start <= lost.end
    assert finished.start <= stream.end <= root.end
    assert generation.attributes["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert generation.attributes["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
    assert generation.attributes["gen_ai.response.finish_reasons"] == ["length"]
    assert "river" not in str(spans)


def check_branches(
    spans: list[ReceivedSpan], lost: ReceivedSpan, finished: ReceivedSpan, usage: dict[str, Any]
) -> None:
    """What each of the two engines says, in order, and the tokens that it had and made."""
    prompt_tokens = usage["prompt_tokens"]
    made_first = lost.attributes["gen_ai.usage.output_tokens"]
    made_second = finished.attributes["gen_ai.usage.output_tokens"]
    assert made_first > 0
    assert made_first + made_second == MAX_TOKENS
    for attempt, to_prefill in ((lost, prompt_tokens), (finished, prompt_tokens + made_first)):
        branch = [span for span in spans if span.parent_id == attempt.span_id]
        names = [span.name for span in branch]
        assert names == ["queue", *["prefill"] * (-(-to_prefill // 64)), *["decode"] * (attempt is finished)]
        moments = [attempt.start, *(moment for span in branch for moment in (span.start, span.end))]
        assert moments == sorted(moments)
        chunks = named(branch, "prefill")
        at = 0
        for chunk in chunks:
            assert chunk.attributes["tandem.prefill.start"] == at
            assert chunk.attributes["tandem.prefill.cached_tokens"] == 0
            at += chunk.attributes["tandem.prefill.tokens"]
        assert at == to_prefill
    (decode,) = named(spans, "decode")
    (queue,) = [span for span in named(spans, "queue") if span.parent_id == finished.span_id]
    assert queue.attributes["tandem.resumed_tokens"] == made_first
    assert decode.attributes["gen_ai.usage.output_tokens"] == made_second
    assert decode.attributes["tandem.finish_reason"] == "length"
    assert [name for name, _, _ in decode.events][:2] == ["first_token", "token"]
    assert [time for _, time, _ in decode.events] == sorted(time for _, time, _ in decode.events)


def test_an_engine_that_drains_sends_its_last_spans(fleet: ProcessFleet, receiver: OtlpReceiver) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "one river " * 60}], "max_tokens": 60}
    client = StreamingClient(
        fleet.frontends[0].port,
        {**body, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}},
    )
    wait_until(lambda: len(client.events) > 5, "the stream has begun")
    first = engine_that_runs(fleet)
    first.send(signal.SIGTERM)
    client.join()
    first.wait()
    spans = receiver.wait_for(CLIENT_TRACE, HTTP_SPAN, "decode")
    decode = named(spans, "decode")[0]
    assert decode.attributes["gen_ai.usage.output_tokens"] == 60
    assert not decode.is_error
