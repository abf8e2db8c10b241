"""Each engine that had a request is a branch of its trace, and is told the span that its own belong below."""

from engine_fleet import Fleet, RecordingSink, long_prompt, run

from services.frontend.generation import Generation
from services.frontend.tracing import MAX_ATTEMPTS, RequestTrace
from shared.sampling_params import SamplingParams
from shared.tracing import FinishedSpan, TraceContext, new_span_id, new_trace_id, parse_w3c


def traced(*, sampled: bool = True) -> RequestTrace:
    context = TraceContext(new_trace_id(), new_span_id(), sampled, "vendor=1")
    return RequestTrace(context, None, recording=True, content=False)


def submit(fleet: Fleet, trace: RequestTrace, max_tokens: int = 10, stop_after: int | None = None) -> Generation:
    sink = RecordingSink(stop_after)
    sampling = SamplingParams(max_tokens=max_tokens)
    generation = Generation("model", long_prompt(max_tokens), sampling, sink, trace=trace.generation(0))
    fleet.pool.submit(generation)
    return generation


def spans(trace: RequestTrace, name: str) -> list[FinishedSpan]:
    return [span for span in trace.spans("GET /", {}, None) if span.name == name]


def outcomes(trace: RequestTrace) -> list[object]:
    return [span.attributes["tandem.outcome"] for span in spans(trace, "generate")]


def test_a_failover_is_a_second_branch() -> None:
    async def main() -> None:
        fleet = Fleet(2)
        await fleet.start()
        trace = traced()
        generation = submit(fleet, trace)
        for _ in range(4):
            await fleet.step()
        first = fleet.engine_with(generation)
        fleet.transport.kill(first)
        await fleet.settle()
        second = fleet.engine_with(generation)
        adds = [fleet.transport.engines[second].added[-1]]
        await fleet.run_to_the_end()
        lost, finished = spans(trace, "generate")
        assert outcomes(trace) == ["lost", "finished"]
        assert (lost.error, finished.error) == ("the engine was lost", None)
        assert f"{lost.attributes['server.address']}:{lost.attributes['server.port']}" == first
        assert f"{finished.attributes['server.address']}:{finished.attributes['server.port']}" == second
        assert [span.attributes["gen_ai.usage.output_tokens"] for span in (lost, finished)] == [4, 6]
        assert [span.attributes["tandem.attempt"] for span in (lost, finished)] == [1, 2]
        assert lost.end <= finished.start
        assert [event.name for event in lost.events + finished.events] == ["first_output"] * 2
        told = parse_w3c(adds[0].trace_context)
        assert told == TraceContext(trace.context.trace_id, finished.span_id, True, "vendor=1")
        routes = spans(trace, "route")
        assert [route.attributes["tandem.attempt"] for route in routes] == [1, 2]
        assert routes[0].end <= lost.start
        assert lost.end <= routes[1].start
        assert {span.parent_id for span in [*routes, lost, finished]} == {trace.context.span_id}
        fleet.assert_clean()

    run(main)


def test_how_an_attempt_ends() -> None:
    async def main() -> None:
        fleet = Fleet(2)
        await fleet.start()
        aborted, stopped, handed_over, refused = traced(), traced(), traced(), traced()
        generation = submit(fleet, aborted)
        await fleet.step()
        fleet.pool.abort(generation.request_id)
        submit(fleet, stopped, stop_after=2)
        await fleet.run_to_the_end()
        generation = submit(fleet, handed_over)
        await fleet.step()
        engine = fleet.transport.engines[fleet.engine_with(generation)]
        engine.drain()
        engine.hand_over()
        await fleet.run_to_the_end()
        for engine in fleet.transport.engines.values():
            engine.overloaded = True
        submit(fleet, refused)
        await fleet.settle()
        assert outcomes(aborted) == ["aborted"]
        assert outcomes(stopped) == ["finished"]
        assert spans(stopped, "generate")[0].attributes["gen_ai.usage.output_tokens"] == 2
        assert outcomes(handed_over) == ["handed_over", "finished"]
        assert outcomes(refused) == ["overloaded"]
        # What was sought in vain.
        assert spans(refused, "route")[-1].attributes["tandem.outcome"] == "given_up"
        assert "as many waiting requests" in str(spans(refused, "route")[-1].error)

    run(main)


def test_waiting_for_an_engine_is_seen() -> None:
    async def main() -> None:
        fleet = Fleet(1, no_engine_timeout=2.0)
        await fleet.start()
        trace = traced()
        submit(fleet, trace)
        await fleet.step()
        fleet.transport.kill(fleet.addresses[0])
        await fleet.pass_time(5)
        assert outcomes(trace) == ["lost"]
        assert spans(trace, "route")[-1].error is not None
        assert fleet.pool.num_requests == 0

    run(main)


def test_engines_hear_nothing_of_a_request_that_is_not_sampled() -> None:
    async def main() -> None:
        fleet = Fleet(1)
        await fleet.start()
        trace = traced(sampled=False)
        submit(fleet, trace)
        await fleet.run_to_the_end()
        (engine,) = fleet.transport.engines.values()
        assert [add.trace_context for add in engine.added] == [[]]
        assert outcomes(trace) == ["finished"]

    run(main)


def test_the_spans_of_one_request_are_bounded() -> None:
    async def main() -> None:
        fleet = Fleet(1)
        await fleet.start()
        trace = traced()
        for index in range(MAX_ATTEMPTS + 20):
            sink = RecordingSink()
            sampling = SamplingParams(max_tokens=1)
            fleet.pool.submit(Generation("model", [index + 1], sampling, sink, trace=trace.generation(index)))
        await fleet.run_to_the_end()
        (engine,) = fleet.transport.engines.values()
        told = [add.trace_context for add in engine.added if add.trace_context]
        generate = spans(trace, "generate")
        assert len(generate) == len(spans(trace, "route")) == len(told) == MAX_ATTEMPTS
        contexts = [parse_w3c(context) for context in told]
        assert {span.span_id for span in generate} == {context.span_id for context in contexts if context is not None}
        (root,) = spans(trace, "GET /")
        assert root.attributes["tandem.trace.attempts_left_out"] == 20

    run(main)
