import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.trace import get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from shared.span_export import SpanExport
from shared.tracing import (
    FinishedSpan,
    SpanEvent,
    TraceContext,
    Tracing,
    TracingConfigError,
    is_sampled,
    new_span_id,
    new_trace_id,
    parse_w3c,
    start_tracing,
    trace_id,
    wants_tracing,
)
from tests.otlp_receiver import OtlpReceiver, otlp_over_grpc, otlp_over_http

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SPAN = "00f067aa0ba902b7"


@pytest.fixture(autouse=True)
def _no_otel_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("OTEL_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")


def test_a_traceparent_is_understood_and_written_again() -> None:
    context = parse_w3c([f"00-{TRACE}-{SPAN}-01", "vendor=1,other=2"])
    assert context == TraceContext(int(TRACE, 16), int(SPAN, 16), True, "vendor=1,other=2")
    assert context.as_w3c() == [f"00-{TRACE}-{SPAN}-01", "vendor=1,other=2"]
    assert TraceContext(1, 2, False).as_w3c() == [f"00-{1:032x}-{2:016x}-00"]


def test_what_logs_and_exemplars_ask_for() -> None:
    assert trace_id([f"00-{TRACE}-{SPAN}-01"]) == TRACE
    assert trace_id([f"00-{TRACE}-{SPAN}-00"]) == TRACE
    assert is_sampled([f"00-{TRACE}-{SPAN}-01"])
    assert not is_sampled([f"00-{TRACE}-{SPAN}-00"])
    for nothing in ([], [""], ["nonsense"]):
        assert trace_id(nothing) == ""
        assert not is_sampled(nothing)


@pytest.mark.parametrize(
    "traceparent",
    [
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE[:-1]}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01\n00",
    ],
)
def test_an_invalid_traceparent_begins_a_new_trace(traceparent: str) -> None:
    assert parse_w3c([traceparent, "vendor=1"]) is None


def test_a_later_version_is_read_as_far_as_it_is_known() -> None:
    context = parse_w3c([f"01-{TRACE}-{SPAN}-03-what-is-new"])
    assert context is not None
    assert context.as_w3c() == [f"00-{TRACE}-{SPAN}-01"]


def test_a_tracestate_that_could_do_harm_is_left_out() -> None:
    many = ",".join(f"a{number}=1" for number in range(33))
    for state in ("a=" + "x" * 5000, "a=\nb", "a=ü", "=,=", "a", "a=b=c", "A=b", "a=,b=1", "@a=1", many):
        context = parse_w3c([f"00-{TRACE}-{SPAN}-01", state])
        assert context is not None
        assert context.state == ""


@pytest.mark.parametrize("state", ["a=1", "a=1, b-/*_0=x y", "1t@system=~", ",,a=1,\t,b=!"])
def test_a_tracestate_goes_on_as_it_came(state: str) -> None:
    context = parse_w3c([f"00-{TRACE}-{SPAN}-01", state])
    assert context is not None
    assert context.state == state


@settings(max_examples=50)
@given(st.from_regex(r"\A[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}(-x)?\Z"))
def test_it_agrees_with_opentelemetrys_own_propagator(traceparent: str) -> None:
    theirs = get_current_span(TraceContextTextMapPropagator().extract({"traceparent": traceparent})).get_span_context()
    ours = parse_w3c([traceparent])
    assert (ours is not None) == theirs.is_valid
    if ours is not None:
        expected = (theirs.trace_id, theirs.span_id, theirs.trace_flags.sampled)
        assert (ours.trace_id, ours.span_id, ours.sampled) == expected


@pytest.mark.parametrize(
    ("variables", "wanted"),
    [
        ({}, False),
        ({"OTEL_SERVICE_NAME": "x", "OTEL_TRACES_SAMPLER": "always_on"}, False),
        ({"OTEL_TRACES_EXPORTER": "otlp"}, True),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://collector:4318/v1/traces"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": " "}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318", "OTEL_SDK_DISABLED": "true"}, False),
    ],
)
def test_the_variables_say_whether_there_are_traces(variables: dict[str, str], wanted: bool) -> None:
    assert wants_tracing(variables) is wanted


def test_without_the_variables_there_are_none() -> None:
    assert start_tracing("frontend") is None


@pytest.fixture(params=["http/protobuf", "grpc", "grpc by its port"])
def receiver(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[OtlpReceiver]:
    over = otlp_over_http if request.param == "http/protobuf" else otlp_over_grpc
    with over() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{receiver.port}")
        if request.param == "grpc":
            monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
        elif request.param == "grpc by its port":
            monkeypatch.setattr("shared.span_export._GRPC_PORT", receiver.port)
        yield receiver


def started(service: str = "frontend") -> Tracing:
    tracing = start_tracing(service)
    assert tracing is not None
    return tracing


def test_spans_arrive_as_they_were_recorded(receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test,service.instance.id=pod-7")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=blue")
    tracing = started("engine")
    now = time.time_ns()
    root = FinishedSpan("root", new_trace_id(), new_span_id(), 0, now, now + 50, kind="server")
    child = FinishedSpan(
        "child",
        root.trace_id,
        new_span_id(),
        root.span_id,
        now + 10,
        now + 5,  # the clock was set back
        {"text": "a", "number": 3, "share": 0.5, "yes": True, "several": ["x", "y"]},
        [SpanEvent("first_token", now + 12, {"tokens": 1})],
        error="it went wrong",
        state="vendor=1",
    )
    tracing.export([child, root])
    tracing.close()
    hex_id = f"{root.trace_id:032x}"
    first, second = receiver.wait_for(hex_id, "root", "child")
    assert (first.name, first.kind, first.parent_id, first.span_id) == ("root", "server", "", f"{root.span_id:016x}")
    assert (first.start, first.end, first.is_error) == (now, now + 50, False)
    assert (second.name, second.parent_id, second.span_id) == ("child", first.span_id, f"{child.span_id:016x}")
    assert (second.start, second.end) == (now + 10, now + 10)
    assert second.attributes == {**child.attributes, "several": ["x", "y"]}
    assert second.events == [("first_token", now + 12, {"tokens": 1})]
    assert (second.is_error, second.status, second.state) == (True, "it went wrong", "vendor=1")
    assert second.resource["service.name"] == "tandem-engine"
    assert second.resource["service.instance.id"] == "pod-7"
    assert second.resource["deployment.environment.name"] == "test"
    assert receiver.headers["x-tenant"] == "blue"


def test_otel_service_name_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "chat")
    with otlp_over_http() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"http://127.0.0.1:{receiver.port}/v1/traces")
        tracing = started()
        tracing.export([FinishedSpan("x", 7, 1, 0, 1, 2)])
        tracing.close()
        (span,) = receiver.wait_for(f"{7:032x}", "x")
    assert span.resource["service.name"] == "chat"


PARENT = TraceContext(2**127, 5, True)


@pytest.mark.parametrize(
    ("sampler", "argument", "of_a_high_id", "of_a_low_id", "parent_sampled", "parent_unsampled"),
    [
        ("", "", True, True, True, False),
        ("always_on", "", True, True, True, True),
        ("always_off", "", False, False, False, False),
        ("traceidratio", "0.5", False, True, False, False),
        ("parentbased_traceidratio", "0.5", False, True, True, False),
        ("parentbased_always_off", "", False, False, True, False),
    ],
)
def test_the_sampler_is_obeyed(
    monkeypatch: pytest.MonkeyPatch,
    sampler: str,
    argument: str,
    of_a_high_id: bool,
    of_a_low_id: bool,
    parent_sampled: bool,
    parent_unsampled: bool,
) -> None:
    if sampler:
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
        monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", argument)
    tracing = SpanExport("frontend", exporters=[])
    high, low = 2**64 - 1, 1  # the sampler looks at the lower half
    decisions = [
        tracing.samples(high, None),
        tracing.samples(low, None),
        tracing.samples(high, TraceContext(high, 5, True)),
        tracing.samples(high, TraceContext(high, 5, False)),
    ]
    assert decisions == [of_a_high_id, of_a_low_id, parent_sampled, parent_unsampled]


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("OTEL_TRACES_EXPORTER", "zipkin", "there are otlp, console and none"),
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json", "there are http/protobuf and grpc"),
        ("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "100000", "max_export_batch_size"),
        ("OTEL_SPAN_EVENT_COUNT_LIMIT", "many", "OTEL_SPAN_EVENT_COUNT_LIMIT"),
    ],
)
def test_what_cannot_be_done_is_said_at_start(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, said: str
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv(name, value)
    with pytest.raises(TracingConfigError, match=said):
        start_tracing("frontend")


def test_limits_of_the_variables_are_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT", "5")
    monkeypatch.setenv("OTEL_SPAN_EVENT_COUNT_LIMIT", "2")
    with otlp_over_http() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{receiver.port}")
        tracing = started()
        events = [SpanEvent(f"e{number}", number) for number in range(5)]
        tracing.export([FinishedSpan("x", 7, 1, 0, 1, 2, {"text": "a long text"}, events)])
        tracing.close()
        (span,) = receiver.wait_for(f"{7:032x}", "x")
    assert span.attributes["text"] == "a lon"
    assert [name for name, _, _ in span.events] == ["e3", "e4"]


def test_a_receiver_that_hangs_holds_nobody_up_and_its_spans_are_bounded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "100")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "10")
    monkeypatch.setattr("shared.span_export.CLOSE_SECONDS", 0.2)
    with otlp_over_http(hangs=True) as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{receiver.port}")
        tracing = started()
        spans = [FinishedSpan("x", 7, number + 1, 0, 1, 2) for number in range(1000)]
        began = time.monotonic()
        # Would it wait for the receiver, it would for its time-out of 10 s.
        with ThreadPoolExecutor(1) as pool:
            pool.submit(tracing.export, spans).result(timeout=5)
        assert queued_spans(tracing) <= 100
        tracing.close()
        assert time.monotonic() - began < 5
        assert receiver.num_requests <= 2
    assert "they are lost" in caplog.text


def test_a_receiver_that_is_down_is_complained_of_seldom(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.5")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "1")
    tracing = started()
    for number in range(5):
        tracing.export([FinishedSpan("x", 7, number + 1, 0, 1, 2)])
        until = time.monotonic() + 30
        while queued_spans(tracing) and time.monotonic() < until:
            time.sleep(0.01)
    tracing.close()
    complaints = [record for record in caplog.records if record.name.startswith("opentelemetry.exporter")]
    assert complaints
    assert len({record.msg for record in complaints}) == len(complaints)


def test_malformed_tracestates_do_not_fill_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")
    tracing = started()
    for number in range(50):
        parent = TraceContext(7, number + 1, True, f"nonsense {number}")
        assert tracing.samples(7, parent)
        tracing.export([FinishedSpan("x", 7, number + 1, number + 1, 1, 2, state=parent.state)])
    tracing.close()
    assert len([record for record in caplog.records if record.name == "opentelemetry.trace.span"]) <= 1


def queued_spans(tracing: Any) -> int:
    (processor,) = tracing._provider._active_span_processor._span_processors
    return len(processor._batch_processor._queue)
