"""The core: stops, refusals, isolation of errors, logprobs, draining, and the idle check."""

import math
from pathlib import Path
from typing import Any

import pytest
from engine_harness import EOS, PEER, Result, generate, make_add, make_core, make_settings, run_to_end, write_model

from services.engine.core import EngineCore, InvariantError
from services.engine.executor.simulated import SimulatedExecutor
from services.engine.request import SampledToken, Step
from shared.protocol import Add, FinishReason, Quarantined, pack_token_ids
from shared.quarantine import prompt_fingerprint
from shared.sampling_params import SamplingParams


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


def echo_core(model: Path, **overrides: Any) -> EngineCore:
    return make_core(model, simulated_tokens="echo", **overrides)


# Stops


def test_max_tokens_ends_with_length(model: Path) -> None:
    result = generate(make_core(model), [5], max_tokens=7)
    assert (len(result.token_ids), result.finish_reason, result.stop_token_id) == (7, FinishReason.LENGTH, None)


def test_eos_ends_with_stop_unless_ignored(model: Path) -> None:
    result = generate(echo_core(model), [5, EOS, 6], max_tokens=10)
    assert (result.token_ids, result.finish_reason, result.stop_token_id) == ([5, EOS], FinishReason.STOP, EOS)
    result = generate(echo_core(model), [5, EOS, 6], max_tokens=3, ignore_eos=True)
    assert (result.token_ids, result.finish_reason) == ([5, EOS, 6], FinishReason.LENGTH)


def test_a_stop_token_id_ends_with_stop_even_where_eos_is_ignored(model: Path) -> None:
    result = generate(echo_core(model), [5, EOS, 6, 7], max_tokens=10, ignore_eos=True, stop_token_ids=[6])
    assert (result.token_ids, result.finish_reason, result.stop_token_id) == ([5, EOS, 6], FinishReason.STOP, 6)


@pytest.mark.parametrize(("min_tokens", "expected"), [(0, 1), (1, 2), (2, 3), (3, 4)])
def test_min_tokens_come_before_any_stop_counts(model: Path, min_tokens: int, expected: int) -> None:
    # Every token would end it; the sampler, which this executor lacks, would not even let them be sampled.
    result = generate(echo_core(model), [6, 6, 6, 6, 6], max_tokens=10, min_tokens=min_tokens, stop_token_ids=[6])
    assert len(result.token_ids) == expected
    assert result.finish_reason is FinishReason.STOP


def test_the_last_allowed_token_may_also_be_a_stop(model: Path) -> None:
    result = generate(echo_core(model), [5, 6], max_tokens=2, stop_token_ids=[6])
    assert result.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("length", [18, 19])
def test_the_context_length_ends_with_length(model: Path, length: int) -> None:
    result = generate(make_core(model, max_model_len=20), list(range(3, 3 + length)), max_tokens=100)
    assert (len(result.token_ids), result.finish_reason) == (20 - length, FinishReason.LENGTH)


@pytest.mark.parametrize("length", [20, 21])
def test_a_prompt_beyond_the_context_is_refused_with_both_numbers(model: Path, length: int) -> None:
    result = generate(make_core(model, max_model_len=20), [5] * length, max_tokens=100)
    assert result.finish_reason is FinishReason.ERROR
    assert f"{length} tokens" in (result.error or "")
    assert "19" in (result.error or "")


def test_the_context_is_limited_to_what_the_cache_holds(model: Path) -> None:
    core = make_core(model, num_kv_blocks=5)
    assert core.limits.max_model_len == 20
    result = generate(core, [5] * 10, max_tokens=100)
    assert (len(result.token_ids), result.finish_reason) == (10, FinishReason.LENGTH)


# Resumed requests


@pytest.mark.parametrize(
    ("output", "fields", "reason", "stop_token_id"),
    [
        ([7, EOS], {}, FinishReason.STOP, EOS),
        ([7, 8], {"stop_token_ids": [8]}, FinishReason.STOP, 8),
        ([7, 8, 9], {"max_tokens": 3}, FinishReason.LENGTH, None),
        ([7] * 15, {"max_tokens": 100}, FinishReason.LENGTH, None),
        ([7] * 30, {"max_tokens": 100}, FinishReason.LENGTH, None),
    ],
)
def test_a_resumed_request_that_had_ended_ends_at_once(
    model: Path, output: list[int], fields: dict, reason: FinishReason, stop_token_id: int | None
) -> None:
    core = make_core(model, max_model_len=20)
    result = generate(core, [5] * 5, output=output, **fields)
    assert (result.token_ids, result.finish_reason, result.stop_token_id) == ([], reason, stop_token_id)
    assert core.statistics.steps == 0


def test_max_tokens_and_min_tokens_count_from_the_first_engine_on(model: Path) -> None:
    result = generate(make_core(model), [5], output=[7, 8, 9], max_tokens=5)
    assert len(result.token_ids) == 2
    result = generate(echo_core(model), [6] * 8, output=[6] * 3, min_tokens=5, max_tokens=9, stop_token_ids=[6])
    assert len(result.token_ids) == 3


def test_an_early_eos_before_min_tokens_does_not_end_a_resumed_request(model: Path) -> None:
    result = generate(make_core(model), [5], output=[EOS], min_tokens=3, max_tokens=4)
    assert len(result.token_ids) == 3


# Refusals


@pytest.mark.parametrize(
    ("add", "says"),
    [
        (make_add(1, []), "empty"),
        (make_add(1, [5, 1000]), "1000"),
        (make_add(1, [-1]), "-1"),
        (make_add(1, [5], output=[1000]), "output so far"),
        (make_add(1, [5], max_tokens=-1), "max_tokens"),
        (make_add(1, [5], top_p=0.0), "top_p"),
        (make_add(1, [5], stop_token_ids=[1000]), "stop_token_ids"),
        (make_add(1, [5], temperature=math.nan), "temperature"),
        (make_add(1, [5], arrival_time=math.nan), "arrival_time"),
        (make_add(1, [5], deadline=math.nan), "deadline"),
        (Add(1, b"123", SamplingParams()), "3 bytes"),
    ],
)
def test_a_wrong_request_gets_its_error_and_harms_no_other(model: Path, add: Add, says: str) -> None:
    core = make_core(model)
    core.add(PEER, make_add(2, [5, 6], max_tokens=3))
    core.add(PEER, add)
    results = run_to_end(core)
    assert results[1].finish_reason is FinishReason.ERROR
    assert says in (results[1].error or "")
    assert len(results[2].token_ids) == 3


def test_past_the_queues_bound_requests_are_refused_as_overload(model: Path) -> None:
    core = make_core(model, max_waiting_requests=3, max_num_seqs=1)
    for request_id in range(5):
        core.add(PEER, make_add(request_id, [5], max_tokens=2))
    results = run_to_end(core)
    assert [results[request_id].finish_reason for request_id in range(5)] == [
        FinishReason.LENGTH,
        FinishReason.LENGTH,
        FinishReason.LENGTH,
        FinishReason.OVERLOADED,
        FinishReason.OVERLOADED,
    ]


def test_the_same_id_twice_is_one_request_and_other_peers_have_ids_of_their_own(model: Path) -> None:
    core = make_core(model)
    core.add(PEER, make_add(1, [5], max_tokens=3))
    core.add(PEER, make_add(1, [6], max_tokens=9))
    core.add(b"another", make_add(1, [5], max_tokens=2))
    tokens: dict[bytes, int] = {}
    while core.has_work:
        for peer, outputs in core.step().items():
            tokens[peer] = tokens.get(peer, 0) + sum(len(output.token_ids) for output in outputs)
    assert tokens == {PEER: 3, b"another": 2}


# Aborts and deadlines


def test_an_abort_frees_everything_in_any_state(model: Path) -> None:
    core = make_core(model, num_kv_blocks=8, max_num_batched_tokens=8)
    core.add(PEER, make_add(1, [5] * 4, max_tokens=20))
    core.step()
    core.add(PEER, make_add(2, [6] * 12, max_tokens=5))  # half prefilled
    core.step()
    core.add(PEER, make_add(3, [7] * 9, max_tokens=5))  # waiting
    core.abort(PEER, [3, 2, 1, 2, 99])
    core.abort(PEER, [1])
    core.abort(b"nobody", [1])
    assert core.num_requests == 0
    assert core.step() == {}
    core.check_when_idle()
    core.check()


def test_an_aborted_request_says_nothing_more(model: Path) -> None:
    core = make_core(model)
    core.add(PEER, make_add(1, [5], max_tokens=20))
    core.step()
    core.abort(PEER, [1])
    assert run_to_end(core) == {}


def test_a_frontend_that_is_gone_takes_its_requests_with_it(model: Path) -> None:
    core = make_core(model)
    core.add(b"gone", make_add(1, [5], max_tokens=20))
    core.add(b"gone", make_add(2, []))
    core.add(PEER, make_add(1, [5], max_tokens=2))
    core.abort_peer(b"gone")
    core.abort_peer(b"gone")
    assert len(run_to_end(core)[1].token_ids) == 2


def test_a_deadline_ends_running_and_waiting_requests(model: Path) -> None:
    now = 100.0
    settings = make_settings(model, max_num_seqs=1)
    core = EngineCore(SimulatedExecutor(settings), settings, clock=lambda: now)
    core.add(PEER, make_add(1, [5], max_tokens=50, deadline=105.0))
    core.add(PEER, make_add(2, [5], max_tokens=50, deadline=103.0))
    core.add(PEER, make_add(3, [5], max_tokens=2, deadline=1e9))
    core.step()
    now = 106.0
    results = run_to_end(core)
    assert results[1].finish_reason is FinishReason.ABORT
    assert results[2].finish_reason is FinishReason.ABORT
    assert results[3].finish_reason is FinishReason.LENGTH


def test_deadlines_of_finished_requests_do_not_pile_up(model: Path) -> None:
    core = make_core(model)
    for request_id in range(500):
        core.add(PEER, make_add(request_id, [5], max_tokens=1, deadline=1e12))
        run_to_end(core)
    assert len(core._deadlines) <= 65


# Logprobs


def test_logprobs_come_one_for_each_token(model: Path) -> None:
    result = generate(make_core(model), [5, 6], max_tokens=3, logprobs=2)
    for output in result.outputs:
        assert output.logprobs is not None
        (logprobs,) = output.logprobs
        assert [logprobs.token_id] == output.token_ids
        assert len(logprobs.top_token_ids) == len(logprobs.top_logprobs) == 2
    assert generate(make_core(model), [5, 6], logprobs=0).outputs[0].logprobs is not None
    assert generate(make_core(model), [5, 6]).outputs[0].logprobs is None


def test_prompt_logprobs_are_gathered_from_all_chunks_whatever_is_cached(model: Path) -> None:
    core = make_core(model, max_num_batched_tokens=8)
    prompt = list(range(10, 40))
    generate(core, prompt, max_tokens=1)
    result = generate(core, prompt, max_tokens=2, prompt_logprobs=1)
    first, second = result.outputs
    assert first.prompt_logprobs is not None
    assert [entry.token_id for entry in first.prompt_logprobs] == prompt[1:]
    assert second.prompt_logprobs is None
    assert result.cached_tokens == 0


def test_prompt_logprobs_survive_preemption(model: Path) -> None:
    core = make_core(model, num_kv_blocks=12, max_num_batched_tokens=6, max_num_seqs=6)
    core.add(PEER, make_add(1, [5] * 4, max_tokens=40, priority=-1))
    core.add(PEER, make_add(2, list(range(10, 35)), max_tokens=3, prompt_logprobs=0))
    results = run_to_end(core)
    (first,) = [output for output in results[2].outputs if output.prompt_logprobs is not None]
    assert [entry.token_id for entry in first.prompt_logprobs or []] == list(range(11, 35))


def test_max_tokens_zero_scores_the_prompt_only(model: Path) -> None:
    result = generate(make_core(model, max_model_len=20), list(range(3, 23)), max_tokens=0, prompt_logprobs=1)
    assert (result.token_ids, result.finish_reason, len(result.outputs)) == ([], FinishReason.LENGTH, 1)
    assert len(result.outputs[0].prompt_logprobs or []) == 19
    assert generate(make_core(model), [5], max_tokens=0, prompt_logprobs=1).outputs[0].prompt_logprobs == []
    assert generate(make_core(model), [5], max_tokens=0).finish_reason is FinishReason.LENGTH


def test_a_resumed_request_does_not_get_its_prompt_logprobs_again(model: Path) -> None:
    result = generate(make_core(model), [5, 6], output=[7], max_tokens=3, prompt_logprobs=1)
    assert all(output.prompt_logprobs is None for output in result.outputs)


# Prefix cache and usage


def test_cached_tokens_come_with_the_first_output(model: Path) -> None:
    core = make_core(model)
    prompt = list(range(10, 22))
    assert generate(core, prompt, max_tokens=3).cached_tokens == 0
    result = generate(core, prompt, max_tokens=3)
    assert result.cached_tokens == 8
    assert [output.cached_tokens for output in result.outputs] == [8, None, None]
    assert generate(core, prompt, max_tokens=1, cache_salt="other").cached_tokens == 0


def test_cached_tokens_never_exceed_the_prompt(model: Path) -> None:
    core = make_core(model)
    output = generate(core, [5] * 6, max_tokens=20).token_ids
    assert generate(core, [5] * 6, output=output[:15], max_tokens=20).cached_tokens == 6


# Faults


class FaultyExecutor(SimulatedExecutor):
    """Fails those requests whose first token is 13, and gives none where it is 14."""

    def execute(self, step: Step) -> list[SampledToken]:
        results = super().execute(step)
        for entry, result in zip(step.scheduled, results, strict=True):
            if entry.request.token_ids[0] == 13:
                result.error = "NaN in the logits " + "x" * 5000
            if entry.request.token_ids[0] == 14:
                result.token_id = None
            result.prompt_logprobs = None
        return results


def test_one_requests_fault_is_its_own(model: Path) -> None:
    settings = make_settings(model, max_num_batched_tokens=16)
    core = EngineCore(FaultyExecutor(settings), settings)
    core.add(PEER, make_add(1, [13] * 30, max_tokens=5))
    core.add(PEER, make_add(2, [5] * 30, max_tokens=5))
    core.add(PEER, make_add(3, [14], max_tokens=5))
    core.add(PEER, make_add(4, [5, 6], max_tokens=5, prompt_logprobs=0))
    results = run_to_end(core)
    assert {request_id: result.finish_reason for request_id, result in results.items()} == {
        1: FinishReason.ERROR,
        2: FinishReason.LENGTH,
        3: FinishReason.ERROR,
        4: FinishReason.ERROR,
    }
    assert (results[1].error or "").startswith("NaN in the logits")
    assert len(results[1].error or "") <= 1000
    assert "prompt logprobs" in (results[4].error or "")


def test_a_leak_is_found_when_idle(model: Path) -> None:
    core = make_core(model)
    core._kv_cache.pool.take()
    with pytest.raises(InvariantError, match="1 KV blocks are in use"):
        core.check_when_idle()


def test_requests_that_cannot_run_end_the_engine_instead_of_hanging_it(model: Path) -> None:
    core = make_core(model, num_kv_blocks=4)
    core.add(PEER, make_add(1, [5] * 10, max_tokens=2))
    for _ in range(3):
        core._kv_cache.pool.take()
    with pytest.raises(InvariantError, match="none of them can ever run"):
        core.step()


# Draining


def test_a_draining_engine_hands_over_what_comes_and_what_waits(model: Path) -> None:
    core = make_core(model, max_num_seqs=1)
    core.add(PEER, make_add(1, [5], max_tokens=3))
    core.add(PEER, make_add(2, [5], max_tokens=3))
    core.step()
    core.draining = True
    core.hand_over(waiting_only=True)
    core.add(PEER, make_add(3, [5], max_tokens=3))
    results = run_to_end(core)
    assert results[1].finish_reason is FinishReason.LENGTH
    assert results[2] == Result(outputs=results[2].outputs, finish_reason=FinishReason.HANDED_OVER)
    assert results[3].finish_reason is FinishReason.HANDED_OVER


def test_after_the_grace_everything_is_handed_over(model: Path) -> None:
    core = make_core(model)
    core.add(PEER, make_add(1, [5], max_tokens=300))
    core.step()
    core.hand_over()
    assert run_to_end(core)[1].finish_reason is FinishReason.HANDED_OVER


# Load


def test_load_tells_how_busy_it_is(model: Path) -> None:
    core = make_core(model, max_num_seqs=1)
    core.add(PEER, make_add(1, [5] * 40, max_tokens=3))
    core.add(PEER, make_add(2, [5] * 4, max_tokens=3))
    core.step()
    load = core.load()
    assert (load.running_requests, load.waiting_requests, load.waiting_tokens) == (1, 1, 8 + 4)
    assert (load.free_blocks, load.total_blocks) == (54, 64)
    run_to_end(core)
    load = core.load()
    assert (load.running_requests, load.waiting_requests, load.waiting_tokens, load.free_blocks) == (0, 0, 0, 64)


def test_a_prompt_in_quarantine_is_refused_until_its_time_is_over(model: Path) -> None:
    core = make_core(model)
    core.set_quarantined([Quarantined(prompt_fingerprint(pack_token_ids([5, 6])), 60.0)])
    refused = generate(core, [5, 6], max_tokens=3)
    assert refused.finish_reason is FinishReason.ERROR
    assert "under this very prompt" in (refused.error or "")
    # Where it goes on from makes no difference.
    assert generate(core, [5, 6], output=[7], max_tokens=3).finish_reason is FinishReason.ERROR
    assert generate(core, [5, 7], max_tokens=3).finish_reason is FinishReason.LENGTH
    assert core.statistics.refused == {"quarantined": 2}
    core.set_quarantined([Quarantined(prompt_fingerprint(pack_token_ids([5, 6])), 0.0)])
    assert generate(core, [5, 6], max_tokens=3).finish_reason is FinishReason.LENGTH
