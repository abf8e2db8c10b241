"""The spans of a request, as the frontend records them over the echo pool."""

import asyncio
import json
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from echo_app import Call, EchoPool, LiveServer
from fastapi import FastAPI
from test_live_streams import CHAT, post, until

from services.frontend.generation import GenerationError
from services.frontend.http.app import create_app
from services.frontend.http.loaded_model import LoadedModel
from services.frontend.http.middleware import tracing as tracing_middleware
from services.frontend.settings import FrontendSettings
from services.frontend.tracing import trace_context_of, trace_of
from shared.tracing import FinishedSpan, TraceContext, trace_id

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SPAN = "00f067aa0ba902b7"


class KeptSpans:
    """A Tracing that samples as it is told, and keeps what it gets."""

    def __init__(self) -> None:
        self.sampled = True
        self.spans: list[FinishedSpan] = []

    def samples(self, trace_id: int, parent: TraceContext | None) -> bool:
        return self.sampled

    def export(self, spans: Iterable[FinishedSpan]) -> None:
        self.spans += spans

    def close(self) -> None:
        pass

    def named(self, name: str) -> FinishedSpan:
        (span,) = [span for span in self.spans if span.name == name]
        return span


@pytest.fixture
def kept() -> KeptSpans:
    return KeptSpans()


@pytest.fixture
def app(settings: FrontendSettings, make_model: Callable[..., LoadedModel], kept: KeptSpans) -> FastAPI:
    return create_app(settings, [make_model()], kept)


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_is_one_tree(call: Call, kept: KeptSpans, stream: bool) -> None:
    headers = {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "vendor=1", "user-agent": "test"}
    body = {**CHAT, "stream": stream, "temperature": 0.5, "max_tokens": 50, "model": "echo/alias"}
    answer = call.post("/v1/chat/completions", body, headers=headers)
    root, generation = kept.named("POST /v1/chat/completions"), kept.named("chat echo/alias")
    template, tokenize = kept.named("template"), kept.named("tokenize")
    written = kept.named("stream" if stream else "respond")
    assert {span.name for span in kept.spans} == {
        "POST /v1/chat/completions",
        "chat echo/alias",
        "template",
        "tokenize",
        written.name,
    }
    assert {span.trace_id for span in kept.spans} == {int(TRACE, 16)}
    assert {span.state for span in kept.spans} == {"vendor=1"}
    assert (root.parent_id, root.parent_is_remote, root.kind) == (int(SPAN, 16), True, "server")
    assert generation.parent_id == root.span_id
    assert template.parent_id == tokenize.parent_id == written.parent_id == generation.span_id
    moments = [root.start, template.start, template.end, tokenize.start, tokenize.end, written.start, root.end]
    assert moments == sorted(moments)
    assert root.attributes["http.request.method"] == "POST"
    assert root.attributes["http.route"] == "/v1/chat/completions"
    assert root.attributes["http.response.status_code"] == 200
    assert root.attributes["user_agent.original"] == "test"
    assert root.attributes["tandem.request.id"] == answer.headers["x-request-id"]
    assert root.error is generation.error is None
    asked = {name: value for name, value in generation.attributes.items() if name.startswith("gen_ai.")}
    first_chunk = asked.pop("gen_ai.response.time_to_first_chunk", None)
    assert (first_chunk is not None) == stream
    assert asked == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "tandem",
        "gen_ai.request.model": "echo/alias",
        "gen_ai.response.model": "echo",
        "gen_ai.request.stream": stream,
        "gen_ai.request.max_tokens": 50,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.seed": asked["gen_ai.request.seed"],
        "gen_ai.usage.input_tokens": 21,
        "gen_ai.usage.output_tokens": 22,
        "gen_ai.usage.cache_read.input_tokens": 3,
        "gen_ai.usage.reasoning.output_tokens": 0,
        "gen_ai.response.finish_reasons": ["stop"],
    }
    assert written.attributes["tandem.detokenize.seconds"] > 0  # type: ignore[operator]
    if stream:
        assert written.attributes["tandem.stream.bytes"] == len(answer.content) - len(b"data: [DONE]\n\n")
    assert "hello" not in str(kept.spans)


def test_completions_of_several_choices(call: Call, kept: KeptSpans) -> None:
    call.complete(["one", "two"], n=2, max_tokens=3)
    generation = kept.named("text_completion echo")
    assert generation.attributes["gen_ai.request.choice.count"] == 2
    assert generation.attributes["gen_ai.usage.output_tokens"] == 12
    assert generation.attributes["gen_ai.response.finish_reasons"] == ["length"] * 4


def test_without_a_client_s_trace_a_new_one_begins(call: Call, kept: KeptSpans) -> None:
    call.chat()
    call.chat()
    roots = [span for span in kept.spans if span.kind == "server"]
    assert [root.parent_id for root in roots] == [0, 0]
    assert len({root.trace_id for root in roots}) == 2


@pytest.mark.parametrize("traceparent", ["nonsense", f"00-{'0' * 32}-{SPAN}-01"])
def test_an_invalid_traceparent_is_not_continued(call: Call, kept: KeptSpans, traceparent: str) -> None:
    call.post("/v1/chat/completions", CHAT, headers={"traceparent": traceparent, "tracestate": "vendor=1"})
    root = kept.named("POST /v1/chat/completions")
    assert (root.parent_id, root.state) == (0, "")


def test_probes_are_not_traced(call: Call, kept: KeptSpans) -> None:
    for path in ("/health", "/health/live", "/metrics"):
        call.get(path)
    assert kept.spans == []


def test_other_routes_and_refusals_have_their_http_span_alone(call: Call, kept: KeptSpans) -> None:
    assert call.get("/v1/models").status_code == 200
    assert call.get("/nowhere").status_code == 404
    assert call.post("/v1/chat/completions", {}).status_code == 400
    statuses = [(span.name, span.attributes["http.response.status_code"], span.error) for span in kept.spans]
    assert statuses == [("GET /v1/models", 200, None), ("GET", 404, None), ("POST /v1/chat/completions", 400, None)]


def test_a_template_that_refuses_is_seen(call: Call, kept: KeptSpans) -> None:
    assert call.chat("REFUSE").status_code == 400
    root, template = kept.named("POST /v1/chat/completions"), kept.named("template")
    assert template.parent_id == root.span_id
    assert template.error == "InvalidPrompt"
    assert root.error is None


def test_an_error_after_the_first_byte_is_the_span_s_error(call: Call, kept: KeptSpans, pool: EchoPool) -> None:
    pool.fail_after = 2
    assert call.chat(stream=True).status_code == 200
    root, generation = kept.named("POST /v1/chat/completions"), kept.named("chat echo")
    assert root.error == generation.error == "the engine died"
    assert root.attributes["http.response.status_code"] == 200
    assert root.attributes["error.type"] == generation.attributes["error.type"] == "500"


def test_an_error_of_the_server_s_own(
    call: Call, kept: KeptSpans, pool: EchoPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "submit", None)
    assert call.chat().status_code == 500
    root = kept.named("POST /v1/chat/completions")
    assert root.error == "answered with status 500"
    assert root.attributes["error.type"] == "500"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_spans(live: LiveServer, kept: KeptSpans, pool: EchoPool, stream: bool) -> None:
    pool.hold_after = 2
    connection = post(live, "/v1/chat/completions", {**CHAT, "stream": stream})
    until(lambda: sum(pool.delivered.values()) == 2)
    assert kept.spans == []
    connection.close()
    until(lambda: len(kept.spans) >= 4)
    root, generation = kept.named("POST /v1/chat/completions"), kept.named("chat echo")
    assert root.error == generation.error == "the client left before the end of its answer"
    assert root.attributes["error.type"] == "client_disconnected"
    assert root.attributes["tandem.disconnected"] is True
    if stream:
        assert kept.named("stream").end <= root.end


def test_a_stream_s_span_lasts_as_long_as_the_stream(live: LiveServer, kept: KeptSpans, pool: EchoPool) -> None:
    pool.hold_after = 5
    connection = post(live, "/v1/chat/completions", {**CHAT, "stream": True})
    assert connection.recv(1 << 16)
    until(lambda: sum(pool.delivered.values()) == 5)
    assert kept.spans == []
    pool.hold_after = None
    until(lambda: bool(kept.spans))
    connection.close()
    root = kept.named("POST /v1/chat/completions")
    assert root.error is None
    assert kept.named("stream").end <= root.end


class TestTail:
    """Requests that were not sampled."""

    @pytest.fixture(autouse=True)
    def _unsampled(self, kept: KeptSpans) -> None:
        kept.sampled = False

    @pytest.fixture
    def settings(self) -> FrontendSettings:
        return FrontendSettings(model="echo", trace_errors=True)

    def test_those_that_go_well_are_dropped(self, call: Call, kept: KeptSpans) -> None:
        assert call.chat().status_code == 200
        assert call.post("/v1/chat/completions", {}).status_code == 400
        assert kept.spans == []

    def test_those_that_fail_are_kept_with_what_this_side_knows(
        self, call: Call, kept: KeptSpans, pool: EchoPool
    ) -> None:
        pool.fail_after = 2
        call.chat(stream=True)
        assert {span.name for span in kept.spans} == {
            "POST /v1/chat/completions",
            "chat echo",
            "template",
            "tokenize",
        }
        assert kept.named("chat echo").attributes["gen_ai.usage.input_tokens"] == 21
        assert pool.submitted[0].trace.next_attempt() == []  # the engine was told of no trace

    def test_refusals_and_clients_that_leave_are_no_failures(self, call: Call, kept: KeptSpans, pool: EchoPool) -> None:
        pool.refuse = GenerationError("full", 429)
        assert call.chat().status_code == 429
        assert kept.spans == []

    def test_of_many_failures_a_few_are_kept(self, app: FastAPI, kept: KeptSpans, pool: EchoPool, monkeypatch) -> None:
        monkeypatch.setattr(tracing_middleware.time, "time_ns", lambda: 5_000_000_000)
        pool.refuse = GenerationError("no engine", 503)
        call = Call(app)
        for _ in range(30):
            assert call.chat().status_code == 503
        assert len([span for span in kept.spans if span.kind == "server"]) == tracing_middleware.MAX_KEPT_PER_SECOND

    @pytest.mark.parametrize(("seconds", "is_kept"), [(1e-6, True), (3600.0, False)])
    def test_slow_ones_are_kept_where_that_is_asked(
        self, make_model: Callable[..., LoadedModel], kept: KeptSpans, seconds: float, is_kept: bool
    ) -> None:
        settings = FrontendSettings(model="echo", trace_slower_than=seconds)
        assert Call(create_app(settings, [make_model()], kept)).chat().status_code == 200
        assert bool(kept.spans) is is_kept

    def test_with_no_rule_nothing_is_recorded(
        self, make_model: Callable[..., LoadedModel], kept: KeptSpans, pool: EchoPool
    ) -> None:
        settings = FrontendSettings(model="echo")
        pool.fail_after = 2
        Call(create_app(settings, [make_model()], kept)).chat()
        assert kept.spans == []


def test_texts_are_recorded_only_where_that_is_switched_on(
    make_model: Callable[..., LoadedModel], kept: KeptSpans
) -> None:
    call = Call(create_app(FrontendSettings(model="echo", trace_content=True), [make_model()], kept))
    call.chat("hello", stream=True)
    call.complete("and bye")
    chat = kept.named("chat echo").attributes
    completion = kept.named("text_completion echo").attributes
    assert json.loads(str(chat["gen_ai.input.messages"])) == [
        {"role": "user", "parts": [{"type": "text", "content": "hello"}]}
    ]
    assert json.loads(str(chat["gen_ai.output.messages"])) == [
        {
            "role": "assistant",
            "parts": [{"type": "text", "content": "user:hello|assistant:"}],
            "finish_reason": "stop",
        }
    ]
    assert "and bye" in str(completion["gen_ai.input.messages"])
    assert "and bye" in str(completion["gen_ai.output.messages"])


def test_what_the_access_log_and_exemplars_ask_for() -> None:
    scope: dict[str, Any] = {"headers": [(b"traceparent", f"00-{TRACE}-{SPAN}-01".encode()), (b"tracestate", b"a=1")]}
    assert trace_context_of(scope) == [f"00-{TRACE}-{SPAN}-01", "a=1"]
    assert trace_of(scope) == (TRACE, True)
    assert trace_context_of({"headers": []}) == []
    assert trace_of({"headers": []}) == ("", False)
    twice = {"headers": [(b"traceparent", f"00-{TRACE}-{SPAN}-01".encode())] * 2}
    assert trace_context_of(twice) == []


def test_the_scope_names_the_request_s_own_span(
    settings: FrontendSettings, make_model: Callable[..., LoadedModel], kept: KeptSpans
) -> None:
    app = create_app(settings, [make_model()], kept)
    seen: list[str] = []

    async def noting(scope: Any, receive: Any, send: Any) -> None:
        try:
            await app(scope, receive, send)
        finally:
            seen.extend(trace_context_of(scope))

    asyncio.run(Call(noting).send("GET", "/v1/models"))  # type: ignore[arg-type]
    root = kept.named("GET /v1/models")
    assert trace_id(seen) == f"{root.trace_id:032x}"
    assert f"{root.span_id:016x}" in seen[0]
