"""Constrained requests through the engine's core: scheduling, preemption, resumption and failure are the real ones."""

import json
import threading
import time
from pathlib import Path

import pytest

from services.engine.core import EngineCore
from services.engine.executor.simulated import SimulatedExecutor
from services.engine.grammars import compiler as compiler_module
from services.frontend.tokenizer import Tokenizer
from shared.protocol import FinishReason
from tests.engine_harness import PEER, make_add, make_core, make_settings, take_step, wait_until
from tests.grammar_harness import constrain, generate_constrained, run_constrained

PERSON = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 3},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    }
)


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Tokenizer:
    return Tokenizer.load(smollm2)


@pytest.fixture
def core(smollm2: Path) -> EngineCore:
    return make_core(smollm2, num_kv_blocks=400, max_num_seqs=64, max_num_batched_tokens=512)


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        ("choice", '["yes", "no"]', {"yes", "no"}),
        ("choice", '["naïve 😀", "北京"]', {"naïve 😀", "北京"}),
        ("regex", "[ab]c{2}", {"acc", "bcc"}),
        ("grammar", 'start: "x" ("y" | "z")', {"xy", "xz"}),
        ("json_schema", '{"enum": [1, true]}', {"1", "true"}),
    ],
)
def test_the_output_is_one_that_the_grammar_allows(
    core: EngineCore, tokenizer: Tokenizer, kind: str, value: str, expected: set[str]
) -> None:
    result = generate_constrained(core, constrain(kind, value))
    assert tokenizer.decode(result.token_ids) in expected
    assert result.finish_reason is FinishReason.STOP
    assert result.stop_token_id is None  # nothing could follow: it need not wait for eos


def test_json_follows_its_schema_for_many_rows_at_once(core: EngineCore, tokenizer: Tokenizer) -> None:
    for request_id in range(16):
        structured = constrain("json_schema", PERSON) if request_id % 2 else None
        core.add(
            PEER, make_add(request_id, [5, request_id], seed=request_id, max_tokens=80, structured_output=structured)
        )
    results = run_constrained(core)
    texts = set()
    for request_id, result in results.items():
        if request_id % 2:
            assert result.finish_reason is FinishReason.STOP
            text = tokenizer.decode(result.token_ids)
            texts.add(text)
            person = json.loads(text)
            assert set(person) == {"name", "age", "tags"}
            assert 0 <= person["age"] <= 120
        else:
            assert len(result.token_ids) == 80
    assert len(texts) == 8


def test_free_rows_are_the_same_beside_constrained_ones(smollm2: Path) -> None:
    def free_tokens(beside: int) -> list[int]:
        core = make_core(smollm2, num_kv_blocks=400)
        core.add(PEER, make_add(0, [7, 8], seed=3, max_tokens=30))
        for request_id in range(1, 1 + beside):
            core.add(PEER, make_add(request_id, [9], max_tokens=30, structured_output=constrain("json_schema", PERSON)))
        return run_constrained(core)[0].token_ids

    assert free_tokens(0) == free_tokens(4)


def test_a_row_whose_grammar_may_end_can_go_on_or_end(core: EngineCore, tokenizer: Tokenizer) -> None:
    result = generate_constrained(core, constrain("regex", "(ab)+"), max_tokens=20)
    assert result.finish_reason is FinishReason.LENGTH  # the simulated model only ends where it must
    assert set(tokenizer.decode(result.token_ids)) == {"a", "b"}


@pytest.mark.parametrize("fields", [{"ignore_eos": True}, {"min_tokens": 100, "max_tokens": 200}, {}])
def test_a_complete_output_ends_whatever_min_tokens_and_ignore_eos_say(
    core: EngineCore, tokenizer: Tokenizer, fields: dict
) -> None:
    result = generate_constrained(core, constrain("json_schema", PERSON), **fields)
    assert result.finish_reason is FinishReason.STOP
    assert json.loads(tokenizer.decode(result.token_ids))


def test_preempted_and_undisturbed_are_the_same(smollm2: Path) -> None:
    def run(**settings: int) -> tuple[dict[int, list[int]], int]:
        core = make_core(smollm2, **settings)
        for request_id in range(6):
            core.add(
                PEER,
                make_add(
                    request_id,
                    [5, request_id],
                    seed=request_id,
                    max_tokens=60,
                    structured_output=constrain("json_schema", PERSON),
                ),
            )
        results = run_constrained(core)
        return {key: result.token_ids for key, result in results.items()}, core.statistics.preemptions

    undisturbed, none = run(num_kv_blocks=400)
    disturbed, some = run(num_kv_blocks=24)
    assert none == 0
    assert some > 0
    assert disturbed == undisturbed


def test_resumed_after_any_token_goes_on_as_if_undisturbed(smollm2: Path) -> None:
    whole = generate_constrained(make_core(smollm2), constrain("json_schema", PERSON), seed=4)
    assert whole.finish_reason is FinishReason.STOP
    core = make_core(smollm2)
    for cut in range(len(whole.token_ids) + 1):
        result = generate_constrained(core, constrain("json_schema", PERSON), seed=4, output=whole.token_ids[:cut])
        assert result.token_ids == whole.token_ids[cut:]
        assert result.finish_reason is FinishReason.STOP


def test_an_output_that_does_not_follow_the_grammar_fails_its_request_alone(core: EngineCore) -> None:
    core.add(PEER, make_add(1, [5], output=[4000], max_tokens=9, structured_output=constrain("choice", '["yes"]')))
    core.add(PEER, make_add(2, [5], max_tokens=9, structured_output=constrain("choice", '["yes"]')))
    results = run_constrained(core)
    assert results[1].finish_reason is FinishReason.ERROR
    assert "does not follow the grammar" in str(results[1].error)
    assert results[2].finish_reason is FinishReason.STOP


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        ("grammar", "start: nothing", "cannot be compiled"),
        ("json_schema", '{"uniqueItems": true}', "uniqueItems"),
        ("json_schema", "{", "not JSON"),
        ("choice", "[]", "at least one string"),
        ("regex", "(", "cannot be compiled"),
        ("sonnet", "abab", "kind"),
    ],
)
def test_a_grammar_that_cannot_be_made_fails_its_request_alone(
    core: EngineCore, kind: str, value: str, message: str
) -> None:
    core.add(PEER, make_add(2, [5], max_tokens=5))
    result = generate_constrained(core, constrain(kind, value))
    assert result.finish_reason is FinishReason.ERROR
    assert message in str(result.error)


def test_a_grammar_that_fails_mid_way_fails_its_request_alone(core: EngineCore) -> None:
    for request_id in (2, 3):
        add = make_add(request_id, [5], max_tokens=80, structured_output=constrain("json_schema", PERSON))
        core.add(PEER, add)
    wait_until(lambda: core.pending_grammars.any_ready, "a grammar")
    results: dict = {}
    while len(core.scheduler.running) < 2:
        take_step(core, results)
    broken = next(request for request in core.scheduler.running if request.key.request_id == 3)
    assert broken.grammar is not None
    broken.grammar.matcher.consume_tokens([4000])  # llguidance gives up on it
    while core.has_work:
        take_step(core, results)
    assert results[3].finish_reason is FinishReason.ERROR
    assert "the grammar could not go on" in str(results[3].error)
    assert results[2].finish_reason is FinishReason.STOP


def test_requests_whose_grammar_is_made_can_be_aborted_time_out_and_be_handed_over(smollm2: Path) -> None:
    core = make_core(smollm2)  # its vocabulary has not been read: the first grammar takes a while
    structured = constrain("json_schema", PERSON)
    core.add(PEER, make_add(1, [5], structured_output=structured))
    assert core.num_requests == 1
    assert not core.has_work
    core.abort(PEER, [1])
    assert core.num_requests == 0
    core.add(PEER, make_add(2, [5], structured_output=structured, deadline=time.time() - 1))
    core.add(PEER, make_add(3, [5], structured_output=structured))
    results: dict = {}
    take_step(core, results)
    assert results[2].finish_reason is FinishReason.ABORT
    core.hand_over(waiting_only=True)
    take_step(core, results)
    assert results[3].finish_reason is FinishReason.HANDED_OVER
    run_constrained(core)


def test_a_deadline_holds_while_nothing_but_a_grammar_is_being_made(
    smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()
    real = compiler_module.llguidance_grammar

    def slow(structured, names):
        assert release.wait(60)
        return real(structured, names)

    monkeypatch.setattr(compiler_module, "llguidance_grammar", slow)
    settings, now = make_settings(smollm2), [1000.0]
    core = EngineCore(SimulatedExecutor(settings), settings, lambda: now[0])
    core.add(PEER, make_add(1, [5], structured_output=constrain("json_schema", PERSON), deadline=1010.0))
    core.add(PEER, make_add(2, [5], structured_output=constrain("choice", '["yes"]')))
    assert not core.has_work
    now[0] += 11
    assert core.has_work  # or an idle loop would not look
    results: dict = {}
    take_step(core, results)
    assert results[1].finish_reason is FinishReason.ABORT
    assert not core.has_work
    release.set()
    assert run_constrained(core)[2].finish_reason is FinishReason.STOP


def test_a_flood_of_grammars_that_are_given_up_leaves_no_queue(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    begun: list[str] = []
    real = compiler_module.llguidance_grammar

    def slow(structured, names):
        begun.append(structured.value)
        assert release.wait(60)
        return real(structured, names)

    monkeypatch.setattr(compiler_module, "llguidance_grammar", slow)
    core = make_core(smollm2)
    for number in range(2000):
        core.add(PEER, make_add(number, [5], structured_output=constrain("choice", f'["{number}"]')))
        core.abort(PEER, [number])
    core.add(PEER, make_add(2000, [5], structured_output=constrain("choice", '["yes"]')))
    release.set()
    assert run_constrained(core)[2000].finish_reason is FinishReason.STOP
    assert len(begun) <= 2 * compiler_module.COMPILE_THREADS


def test_requests_that_wait_for_grammars_are_bounded(smollm2: Path) -> None:
    core = make_core(smollm2, max_waiting_requests=2)
    for request_id in range(3):
        core.add(PEER, make_add(request_id, [5], max_tokens=30, structured_output=constrain("json_schema", PERSON)))
    assert core.load().waiting_requests == 2
    results = run_constrained(core)
    assert results[2].finish_reason is FinishReason.OVERLOADED
    assert results[0].finish_reason is results[1].finish_reason is FinishReason.STOP


def test_other_requests_run_while_a_grammar_is_made(smollm2: Path) -> None:
    core = make_core(smollm2)
    core.add(PEER, make_add(1, [5], max_tokens=3, structured_output=constrain("choice", '["yes"]')))
    core.add(PEER, make_add(2, [5], max_tokens=3))
    results: dict = {}
    for _ in range(3):
        take_step(core, results)
    assert results[2].finish_reason is FinishReason.LENGTH
    assert run_constrained(core)[1].finish_reason is FinishReason.STOP


def test_a_prompt_that_is_only_scored_needs_no_grammar(core: EngineCore) -> None:
    result = generate_constrained(core, constrain("regex", "("), max_tokens=0, prompt_logprobs=0)
    assert result.finish_reason is FinishReason.LENGTH
    assert not core.pending_grammars.requests


@pytest.mark.parametrize("tags", [("<think>", "</think>"), ("<repo_name>", "<jupyter_code>")])
def test_the_grammar_begins_after_the_reasoning(core: EngineCore, tokenizer: Tokenizer, tags: tuple[str, str]) -> None:
    """Its tags may be text or single tokens."""
    start, end = tags
    thought = tokenizer.encode("well {\n\n let me see < / think", add_special_tokens=False)
    closing = tokenizer.encode(end, add_special_tokens=False)
    structured = constrain("choice", '["yes"]', reasoning_start=start, reasoning_end=end, reasoning_opened=True)
    result = generate_constrained(core, structured, output=thought + closing)
    assert tokenizer.decode(result.token_ids).strip("\n") == "yes"
    # The model may not end while it thinks.
    result = generate_constrained(core, structured, output=thought, max_tokens=len(thought) + 10)
    assert result.finish_reason is FinishReason.LENGTH
    optional = constrain("choice", '["yes"]', reasoning_start=start, reasoning_end=end)
    opening = tokenizer.encode(start, add_special_tokens=False)
    result = generate_constrained(core, optional, output=opening + thought + closing)
    assert tokenizer.decode(result.token_ids).strip("\n") == "yes"
    result = generate_constrained(core, optional, output=tokenizer.encode("ye", add_special_tokens=False))
    assert tokenizer.decode(result.token_ids) == "s"
