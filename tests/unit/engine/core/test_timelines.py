"""What the engine records of sampled requests: each second of their time, in order, whatever becomes of them."""

import itertools
from pathlib import Path

import pytest
from engine_harness import PEER, make_add, make_core, run_to_end, take_step, write_model

from services.engine import timelines as timelines_module
from services.engine.core import EngineCore
from services.engine.request import SampledToken
from services.engine.timelines import Timelines
from shared.tracing import FinishedSpan, TraceContext

PARENT = TraceContext(0xABC, 0xDEF, True, "vendor=1")
TRACED = {"trace_context": PARENT.as_w3c()}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


def traced_core(model: Path, **overrides: object) -> EngineCore:
    core = make_core(model, **overrides)
    core.timelines = Timelines(lambda trace_id, parent: parent is not None and parent.sampled)
    return core


def spans_of(core: EngineCore) -> list[FinishedSpan]:
    run_to_end(core)
    assert not core.timelines
    return core.timelines.take_finished()


def names(spans: list[FinishedSpan]) -> list[str]:
    return [span.name for span in spans]


def assert_in_order(spans: list[FinishedSpan]) -> None:
    """One after the other, and all below the frontend's span."""
    for before, after in itertools.pairwise(spans):
        assert before.start <= before.end <= after.start <= after.end
    assert {(span.trace_id, span.parent_id, span.parent_is_remote, span.state) for span in spans} == {
        (0xABC, 0xDEF, True, "vendor=1")
    }


def test_a_long_prompt_is_a_span_a_chunk(model: Path) -> None:
    core = traced_core(model, max_num_batched_tokens=32)
    core.add(PEER, make_add(1, list(range(100, 180)), max_tokens=9, ignore_eos=True, **TRACED))
    spans = spans_of(core)
    assert names(spans) == ["queue", "prefill", "prefill", "prefill", "decode"]
    assert_in_order(spans)
    chunks = [(s.attributes["tandem.prefill.start"], s.attributes["tandem.prefill.tokens"]) for s in spans[1:4]]
    assert chunks == [(0, 32), (32, 32), (64, 16)]
    queue, decode = spans[0], spans[-1]
    assert queue.attributes == {"tandem.queue.requests_ahead": 0}
    assert decode.attributes["gen_ai.usage.output_tokens"] == 9
    assert decode.attributes["tandem.finish_reason"] == "length"
    assert decode.attributes["tandem.decode.longest_gap_seconds"] > 0  # type: ignore[operator]
    assert [(event.name, event.attributes["tandem.token"]) for event in decode.events] == [
        ("first_token", 1),
        ("token", 2),
        ("token", 4),
        ("token", 8),
    ]
    assert [event.time for event in decode.events] == sorted(event.time for event in decode.events)
    assert decode.events[0].time == decode.start
    assert decode.events[-1].time <= decode.end


def test_cached_tokens_are_told_with_the_first_chunk(model: Path) -> None:
    core = traced_core(model)
    prompt = list(range(100, 130))
    core.add(PEER, make_add(1, prompt, max_tokens=1))
    run_to_end(core)
    core.add(PEER, make_add(2, prompt, max_tokens=2, ignore_eos=True, **TRACED))
    prefill = spans_of(core)[1]
    assert prefill.attributes["tandem.prefill.cached_tokens"] == prefill.attributes["tandem.prefill.start"] == 28
    assert prefill.attributes["tandem.prefill.tokens"] == 2


def test_what_is_known_goes_out_with_the_first_token(model: Path) -> None:
    core = traced_core(model)
    core.add(PEER, make_add(1, [5, 6], max_tokens=5, ignore_eos=True, **TRACED))
    take_step(core, {})
    assert names(core.timelines.take_finished()) == ["queue", "prefill"]
    assert names(spans_of(core)) == ["decode"]


def test_a_resumed_request_says_what_it_came_with(model: Path) -> None:
    core = traced_core(model)
    core.add(PEER, make_add(1, [5, 6], output=[7, 8, 9], max_tokens=5, ignore_eos=True, **TRACED))
    queue, prefill, decode = spans_of(core)
    assert queue.attributes["tandem.resumed_tokens"] == 3
    assert prefill.attributes["tandem.prefill.tokens"] == 5
    assert decode.attributes["gen_ai.usage.output_tokens"] == 2


def test_a_preemption_is_an_event_and_what_follows_is_seen(model: Path) -> None:
    core = traced_core(model, num_kv_blocks=16, max_num_seqs=4)
    # The older one lives; the younger gives up its blocks.
    core.add(PEER, make_add(1, list(range(100, 120)), max_tokens=40, ignore_eos=True, arrival_time=1.0))
    core.add(PEER, make_add(2, list(range(200, 208)), max_tokens=30, ignore_eos=True, arrival_time=2.0, **TRACED))
    spans = spans_of(core)
    assert core.statistics.preemptions >= 1
    preemptions = core.statistics.preemptions
    assert names(spans).count("queue") == 1 + preemptions
    assert names(spans).count("decode") == 1
    decode = spans[-1]
    assert [event.name for event in decode.events].count("preempted") == preemptions
    assert decode.attributes["tandem.preemptions"] == preemptions
    assert decode.attributes["gen_ai.usage.output_tokens"] == 30
    queues = [span for span in spans if span.name == "queue"]
    assert queues[1].attributes == {"tandem.preempted": True}
    recomputed = [span for span in spans if span.attributes.get("tandem.prefill.recompute")]
    assert len(recomputed) >= preemptions
    assert decode.start <= queues[1].start <= queues[1].end <= recomputed[0].start <= recomputed[0].end <= decode.end


def test_a_request_that_is_aborted_in_the_queue(model: Path) -> None:
    core = traced_core(model)
    core.add(PEER, make_add(1, [5], max_tokens=5, **TRACED))
    core.abort(PEER, [1])
    (queue,) = spans_of(core)
    assert (queue.name, queue.attributes["tandem.finish_reason"], queue.error) == ("queue", "abort", None)


def test_a_request_that_is_aborted_while_it_is_prefilled(model: Path) -> None:
    core = traced_core(model)
    core.add(PEER, make_add(1, list(range(100, 180)), max_tokens=5, **TRACED))
    take_step(core, {})
    core.abort(PEER, [1])
    spans = spans_of(core)
    assert names(spans) == ["queue", "prefill"]
    assert spans[-1].attributes["tandem.finish_reason"] == "abort"


def test_a_request_that_is_handed_over(model: Path) -> None:
    core = traced_core(model)
    core.add(PEER, make_add(1, [5], max_tokens=50, ignore_eos=True, **TRACED))
    for _ in range(3):
        take_step(core, {})
    core.hand_over()
    spans = spans_of(core)
    assert names(spans) == ["queue", "prefill", "decode"]
    assert spans[-1].attributes["tandem.finish_reason"] == "handed_over"
    assert spans[-1].attributes["gen_ai.usage.output_tokens"] == 3
    assert spans[-1].error is None


def test_a_request_that_fails(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core = traced_core(model)
    core.add(PEER, make_add(1, [5], max_tokens=50, ignore_eos=True, **TRACED))
    take_step(core, {})
    monkeypatch.setattr(core.executor, "execute", lambda step: [SampledToken(error="NaN") for _ in step.scheduled])
    spans = spans_of(core)
    assert spans[-1].name == "decode"
    assert spans[-1].error is not None


def test_a_prompt_that_is_only_scored_has_no_decode(model: Path) -> None:
    core = traced_core(model)
    core.add(PEER, make_add(1, [5, 6, 7], max_tokens=0, prompt_logprobs=0, **TRACED))
    spans = spans_of(core)
    assert names(spans) == ["queue", "prefill"]
    assert spans[-1].attributes["tandem.finish_reason"] == "length"


@pytest.mark.parametrize("context", [[], ["nonsense"], TraceContext(1, 2, False).as_w3c()])
def test_others_are_not_watched(model: Path, context: list[str]) -> None:
    core = traced_core(model)
    core.add(PEER, make_add(1, [5], max_tokens=5, trace_context=context))
    assert not core.timelines
    assert spans_of(core) == []


def test_without_an_exporter_nobody_is_watched(model: Path) -> None:
    core = make_core(model)
    core.add(PEER, make_add(1, [5], max_tokens=5, **TRACED))
    assert not core.timelines
    run_to_end(core)


def test_the_spans_of_one_request_are_bounded(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timelines_module, "MAX_SPANS", 5)
    core = traced_core(model, max_num_batched_tokens=8)
    core.add(PEER, make_add(1, list(range(100, 200)), max_tokens=3, ignore_eos=True, **TRACED))
    spans = spans_of(core)
    assert names(spans) == ["queue", "prefill", "prefill", "prefill", "prefill", "decode"]
    assert [span.attributes["tandem.prefill.tokens"] for span in spans[1:-1]] == [8, 8, 8, 76]
    assert_in_order(spans)
