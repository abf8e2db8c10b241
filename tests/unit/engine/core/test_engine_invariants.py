"""Whatever happens to requests, their tokens stay the same, and in the end every block is free."""

import tempfile
from pathlib import Path

import pytest
from engine_harness import Result, make_add, make_core, run_to_end, take_step, write_model
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.protocol import FinishReason


@pytest.fixture(scope="module")
def model() -> Path:
    return write_model(Path(tempfile.mkdtemp()) / "model", vocab_size=50)


requests = st.fixed_dictionaries(
    {
        # Beginnings of two texts, so that prefixes are shared.
        "prompt": st.builds(
            lambda token, length, end: [token + position % 7 for position in range(length)] + end,
            st.sampled_from([3, 20]),
            st.integers(1, 18),
            st.lists(st.integers(3, 40), max_size=2),
        ),
        "max_tokens": st.just(0) | st.integers(5, 20),
        "seed": st.integers(0, 1),
        "priority": st.integers(-1, 1),
        "prompt_logprobs": st.none() | st.just(0),
    }
)
engines = st.fixed_dictionaries(
    {
        # So few that requests preempt each other.
        "num_kv_blocks": st.integers(8, 14),
        "max_num_seqs": st.integers(2, 6),
        "max_num_batched_tokens": st.integers(1, 40),
        "enable_prefix_caching": st.booleans(),
        "block_size": st.integers(2, 5),
    }
)


def undisturbed(model: Path, asked: dict) -> list[int]:
    core = make_core(model, num_kv_blocks=1000, max_num_batched_tokens=1000, enable_prefix_caching=False)
    core.add(b"alone", make_add(1, **{**asked, "prompt_logprobs": None}))
    return run_to_end(core)[1].token_ids


@settings(max_examples=60, deadline=None)
@given(engines, st.lists(requests, min_size=3, max_size=8))
def test_chunked_cached_and_preempted_equal_undisturbed(model: Path, engine: dict, asked: list[dict]) -> None:
    core = make_core(model, **engine)
    limit = engine["num_kv_blocks"] * engine["block_size"]
    for request_id, fields in enumerate(asked):
        core.add(b"peer", make_add(request_id, **fields))
    results = run_to_end(core)
    for request_id, fields in enumerate(asked):
        room = limit - len(fields["prompt"])
        if room < min(1, fields["max_tokens"]):
            assert results[request_id].finish_reason is FinishReason.ERROR
        else:
            assert results[request_id].token_ids == undisturbed(model, fields)[:room]
        gathered = [output.prompt_logprobs for output in results[request_id].outputs]
        if fields["prompt_logprobs"] is not None and results[request_id].finish_reason is FinishReason.LENGTH:
            assert gathered[0] is not None
            assert [entry.token_id for entry in gathered[0]] == fields["prompt"][1:]


actions = st.lists(
    st.one_of(
        st.tuples(st.just("add"), requests),
        st.tuples(st.just("add"), requests),
        st.tuples(st.just("step"), st.integers(1, 6)),
        st.tuples(st.just("abort"), st.integers(0, 30)),
        st.tuples(st.just("lose peer"), st.integers(0, 1)),
        st.tuples(st.just("step"), st.integers(1, 6)),
        st.tuples(st.just("move"), st.integers(0, 30)),
    ),
    min_size=10,
    max_size=40,
)


@settings(max_examples=80, deadline=None)
@given(engines, actions)
def test_after_any_mix_nothing_is_left(model: Path, engine: dict, mix: list[tuple[str, object]]) -> None:
    core = make_core(model, max_waiting_requests=6, **engine)
    peers = (b"one", b"two")
    asked: list[dict] = []
    results: dict[int, Result] = {}
    silent: set[int] = set()
    for action, value in mix:
        if action == "add":
            core.add(peers[len(asked) % 2], make_add(len(asked), **value))  # type: ignore[arg-type]
            asked.append(value)  # type: ignore[arg-type]
        elif action == "abort":
            for peer in peers:
                core.abort(peer, [value])  # type: ignore[list-item]
            silent.add(value)  # type: ignore[arg-type]
        elif action == "lose peer":
            core.abort_peer(peers[value])  # type: ignore[index]
            silent.update(request_id for request_id in range(len(asked)) if request_id % 2 == value)
        elif action == "move" and value in results and value not in silent and results[value].finish_reason is None:  # type: ignore[comparison-overlap]
            # To another engine and back: aborted here, and added again with the output so far.
            peer = peers[value % 2]  # type: ignore[operator]
            core.abort(peer, [value])  # type: ignore[list-item]
            add = make_add(value, output=results[value].token_ids, **asked[value])  # type: ignore[arg-type,index]
            results[value].cached_tokens = None  # type: ignore[index]
            core.add(peer, add)
        elif action == "step":
            for _ in range(value):  # type: ignore[arg-type]
                take_step(core, results)
                core.check()
    for _ in range(5000):
        if not core.has_work:
            break
        take_step(core, results)
        core.check()
    core.check_when_idle()
    assert core.num_requests == 0
    assert core.num_free_blocks == core.num_blocks
    for request_id, fields in enumerate(asked):
        if request_id in silent:
            continue
        assert results[request_id].finish_reason is not None
        if results[request_id].finish_reason is FinishReason.LENGTH:
            expected = undisturbed(model, fields)
            assert results[request_id].token_ids == expected[: len(results[request_id].token_ids)]
    stored, _ = core.take_block_events().take(10_000)
    assert set(stored) == set(core.stored_block_hashes())
