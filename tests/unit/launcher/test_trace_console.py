"""Traces on the console: what is collected, and how it is drawn."""

import urllib.error
import urllib.request

import pytest

from services.launcher import trace_console as trace_console_module
from services.launcher.trace_console import trace_console
from services.launcher.trace_tree import TreeSpan, render_trace
from shared.span_export import SpanExport
from shared.tracing import FinishedSpan


def test_a_tree_is_drawn() -> None:
    millisecond = 1_000_000
    spans = [
        TreeSpan("decode", b"5", b"4", 50 * millisecond, 100 * millisecond, {"gen_ai.usage.output_tokens": 1}),
        TreeSpan("POST /x", b"1", b"client's", 0, 100 * millisecond, {"http.response.status_code": 200}),
        TreeSpan("template", b"2", b"1", 1 * millisecond, 2 * millisecond),
        TreeSpan(
            "generate",
            b"4",
            b"1",
            25 * millisecond,
            100 * millisecond,
            {"server.address": "10.0.0.7", "server.port": 5555, "tandem.outcome": "lost"},
            error="it was lost",
        ),
    ]
    drawn = render_trace("abc", spans, color=False).splitlines()
    bars = ["━" * 28, "━" + "·" * 27, "·" * 7 + "━" * 21, "·" * 14 + "━" * 14]
    assert drawn == [
        "trace abc",
        f"  POST /x                              0.00 ms    100 ms  {bars[0]}  200",
        f"  ├ template                            1.0 ms    1.0 ms  {bars[1]}",
        f"  └ generate                           25.0 ms   75.0 ms  {bars[2]}  10.0.0.7:5555, lost  ✗ it was lost",
        f"    └ decode                           50.0 ms   50.0 ms  {bars[3]}  1 token made",
    ]


def test_spans_without_their_parent_are_shown_all_the_same() -> None:
    drawn = render_trace(
        "abc", [TreeSpan("queue", b"1", b"lost", 5, 6), TreeSpan("prefill", b"2", b"gone", 6, 7)], color=True
    )
    assert [name in drawn for name in ("queue", "prefill")] == [True, True]


def test_a_trace_is_shown_once_it_is_whole_and_others_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_console_module, "_QUIET_SECONDS", 3600)
    shown: list[str] = []
    with trace_console(shown.append) as variables:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        export = SpanExport("frontend")
        export.export([FinishedSpan("queue", 7, 1, 9, 1, 2), FinishedSpan("queue", 8, 1, 9, 1, 2)])
        export.export([FinishedSpan("GET /x", 7, 9, 0, 1, 3, kind="server")])
        export.close()
        assert shown == []
    (tree,) = shown  # the other is not answered yet
    assert f"{7:032x}" in tree
    assert tree.count("queue") == 1


def test_traces_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_console_module, "MAX_TRACES", 3)
    monkeypatch.setattr(trace_console_module, "MAX_SPANS", 2)
    monkeypatch.setattr(trace_console_module, "_QUIET_SECONDS", 3600)
    shown: list[str] = []
    with trace_console(shown.append) as variables:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        export = SpanExport("frontend")
        for trace in range(1, 6):
            export.export([FinishedSpan("GET /x", trace, span, 0, 1, 3, kind="server") for span in range(1, 5)])
        export.close()
    assert len(shown) == 3
    assert all(tree.count("GET /x") == 2 for tree in shown)


def test_nonsense_is_refused() -> None:
    with trace_console(print) as variables:
        url = variables["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"]
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(url, data=b"\xff\xff nonsense", timeout=10)
    assert refused.value.code == 400
