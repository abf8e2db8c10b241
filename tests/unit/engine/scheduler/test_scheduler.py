"""What a step computes: order, budget, admission, preemption."""

from typing import Any

from services.engine.kv_cache import KVCache
from services.engine.request import Request, RequestKey, RequestStatus, Step
from services.engine.scheduler import Scheduler
from services.engine.settings import EngineSettings, StepBudget
from shared.sampling_params import SamplingParams


def make_scheduler(
    num_blocks: int = 64, block_size: int = 4, seqs: int = 8, budget: int = 32, usual: int | None = None
) -> Scheduler:
    return Scheduler(KVCache(num_blocks, block_size), seqs, budget, max_waiting_requests=4, usual_step_tokens=usual)


def add(scheduler: Scheduler, name: int, length: int, priority: int = 0, arrival: float = 0.0) -> Request:
    token_ids = [name * 1000 + position for position in range(length)]
    request = Request(
        RequestKey(b"peer", name), token_ids, length, SamplingParams(), priority, arrival, max_total_tokens=length + 100
    )
    scheduler.add(request)
    return request


def shares(step: Step) -> list[tuple[int, int, int]]:
    """(request, start, number of tokens) of a step's entries."""
    return [(entry.request.key.request_id, entry.start, entry.num_tokens) for entry in step.scheduled]


def carry_out(scheduler: Scheduler, step: Step) -> None:
    """What the core does after a step, without stops."""
    for entry in step.scheduled:
        entry.request.num_computed_tokens = entry.start + entry.num_tokens
        scheduler.kv_cache.store_computed(entry.request)
        if entry.samples:
            entry.request.token_ids.append(7)
    scheduler.take_preempted()
    scheduler.kv_cache.check(scheduler.running)


def run(scheduler: Scheduler, steps: int = 1) -> list[list[tuple[int, int, int]]]:
    made: list[list[tuple[int, int, int]]] = []
    for _ in range(steps):
        step = scheduler.schedule()
        made.append(shares(step))
        carry_out(scheduler, step)
    return made


def test_a_long_prompt_comes_in_chunks_of_the_budget() -> None:
    scheduler = make_scheduler(budget=10)
    add(scheduler, 1, 25)
    assert run(scheduler, 4) == [[(1, 0, 10)], [(1, 10, 10)], [(1, 20, 5)], [(1, 25, 1)]]


def test_steps_are_large_while_much_waits_and_small_again_after_it() -> None:
    scheduler = make_scheduler(budget=20, usual=10)
    add(scheduler, 1, 100)
    add(scheduler, 2, 95)
    sizes = [sum(tokens for _, _, tokens in step) for step in run(scheduler, 8)]
    # 195 tokens wait, then 175, then 155: 160 make a backlog.
    assert sizes == [20, 20, 10, 10, 10, 10, 10, 10]


def test_a_cpu_takes_small_steps_unless_told_otherwise() -> None:
    def budget(device: str, **values: Any) -> StepBudget:
        return EngineSettings(model="any", **values).step_budget(device)

    assert budget("cpu") == StepBudget(256, 512)
    assert budget("cpu", max_num_seqs=300) == StepBudget(600, 1200)
    assert budget("cuda") == StepBudget(2048, 2048)
    assert budget("cpu", max_num_batched_tokens=100) == StepBudget(100, 100)


def test_decodes_run_in_every_step_beside_a_long_cold_prompt() -> None:
    scheduler = make_scheduler(budget=10)
    for name in (1, 2, 3):
        add(scheduler, name, 3)
    run(scheduler)
    add(scheduler, 4, 100)
    for step in run(scheduler, 10):
        assert [entry[0] for entry in step[:3]] == [1, 2, 3]
        assert all(entry[2] == 1 for entry in step[:3])
        assert step[3][0] == 4
        assert step[3][2] == 7


def test_decodes_come_before_prefills_whatever_the_priority() -> None:
    scheduler = make_scheduler()
    add(scheduler, 1, 3, priority=5)
    run(scheduler)
    add(scheduler, 2, 9, priority=0)
    assert run(scheduler) == [[(1, 3, 1), (2, 0, 9)]]


def test_waiting_requests_come_by_priority_then_arrival() -> None:
    scheduler = make_scheduler(budget=4, seqs=1)
    for name, priority, arrival in [(1, 1, 1.0), (2, 0, 9.0), (3, 0, 5.0), (4, -1, 10.0)]:
        add(scheduler, name, 2, priority, arrival)
    order = []
    while scheduler.waiting or scheduler.running:
        run(scheduler)
        (request,) = scheduler.running
        order.append(request.key.request_id)
        scheduler.finish(request)
    assert order == [4, 3, 2, 1]


def test_equal_arrival_times_keep_their_order() -> None:
    scheduler = make_scheduler(budget=100)
    for name in (3, 1, 2):
        add(scheduler, name, 2)
    assert [entry[0] for entry in run(scheduler)[0]] == [3, 1, 2]


def test_an_important_prompt_overtakes_one_that_is_half_computed() -> None:
    scheduler = make_scheduler(budget=10)
    add(scheduler, 1, 40, priority=1)
    run(scheduler)
    add(scheduler, 2, 8, priority=0)
    assert run(scheduler) == [[(2, 0, 8), (1, 10, 2)]]


def test_never_more_requests_than_allowed() -> None:
    scheduler = make_scheduler(seqs=2)
    requests = [add(scheduler, name, 2) for name in range(4)]
    run(scheduler, 3)
    assert len(scheduler.running) == 2
    scheduler.finish(requests[0])
    run(scheduler)
    assert [request.key.request_id for request in scheduler.running] == [1, 2]


def test_more_requests_than_budget_would_starve_some_so_the_budget_rules() -> None:
    scheduler = make_scheduler(seqs=100, budget=3)
    for name in range(5):
        add(scheduler, name, 1)
    for step in run(scheduler, 3):
        assert len(step) == 3


def test_admission_waits_for_free_blocks_and_keeps_the_order() -> None:
    scheduler = make_scheduler(num_blocks=6, budget=100)
    first = add(scheduler, 1, 14)
    add(scheduler, 2, 10)
    add(scheduler, 3, 1)
    # 2 does not fit, and 3, which would, does not overtake it.
    assert run(scheduler, 2) == [[(1, 0, 14)], [(1, 14, 1)]]
    scheduler.finish(first)
    assert run(scheduler) == [[(2, 0, 10), (3, 0, 1)]]


def test_the_youngest_of_the_lowest_priority_gives_way() -> None:
    scheduler = make_scheduler(num_blocks=9, budget=100)
    add(scheduler, 1, 7, priority=0, arrival=3.0)
    lowest_old = add(scheduler, 2, 7, priority=1, arrival=1.0)
    lowest_young = add(scheduler, 3, 7, priority=1, arrival=2.0)
    run(scheduler, 2)
    assert len(scheduler.running) == 3
    steps = 0
    while lowest_young.status is RequestStatus.RUNNING:
        run(scheduler)
        steps += 1
        assert steps < 20
    assert lowest_young.num_preemptions == 1
    assert lowest_young.block_table == []
    assert lowest_old.status is RequestStatus.RUNNING
    assert scheduler.waiting == [lowest_young]


def test_a_preempted_request_goes_on_from_all_its_tokens() -> None:
    scheduler = make_scheduler(num_blocks=5, budget=100)
    first = add(scheduler, 1, 6)
    second = add(scheduler, 2, 6)
    while not second.num_preemptions:
        run(scheduler)
    length = len(second.token_ids)
    assert length > 6
    scheduler.finish(first)
    (step,) = run(scheduler)
    (entry,) = step
    assert entry[0] == 2
    assert entry[1] + entry[2] == length
    assert len(second.token_ids) == length + 1


def test_what_was_taken_is_not_given_away_in_the_same_step() -> None:
    scheduler = make_scheduler(num_blocks=4, budget=100)
    add(scheduler, 1, 7)
    add(scheduler, 2, 4)
    run(scheduler, 1)
    while not scheduler.waiting:
        step = scheduler.schedule()
        if scheduler.waiting:
            assert [entry.request.key.request_id for entry in step.scheduled] == [1]
        carry_out(scheduler, step)


def test_finishing_twice_changes_nothing() -> None:
    scheduler = make_scheduler()
    request = add(scheduler, 1, 5)
    waiting = add(scheduler, 2, 5)
    run(scheduler)
    assert scheduler.finish(request)
    assert not scheduler.finish(request)
    assert scheduler.finish(waiting)
    assert not scheduler.finish(waiting)
    assert scheduler.kv_cache.num_free == scheduler.kv_cache.num_blocks
    assert scheduler.uncomputed_tokens == 0


def test_what_can_never_fit_is_told_so() -> None:
    scheduler = make_scheduler(num_blocks=4)
    fits = Request(RequestKey(b"p", 1), [1] * 10, 10, SamplingParams(), max_total_tokens=17)
    never = Request(RequestKey(b"p", 2), [1] * 10, 10, SamplingParams(), max_total_tokens=18)
    assert scheduler.refusal(fits) is None
    assert "5 KV blocks" in (scheduler.refusal(never) or "")


def test_the_waiting_queue_has_a_bound() -> None:
    scheduler = make_scheduler()
    for name in range(4):
        assert not scheduler.is_full
        add(scheduler, name, 1)
    assert scheduler.is_full


def test_uncomputed_tokens_are_counted() -> None:
    scheduler = make_scheduler(budget=10, seqs=1)
    add(scheduler, 1, 25)
    add(scheduler, 2, 7)
    assert scheduler.uncomputed_tokens == 32
    run(scheduler)
    assert scheduler.uncomputed_tokens == 15 + 7


def test_a_blocked_head_begins_once_a_running_request_has_computed_its_prefix() -> None:
    scheduler = make_scheduler(num_blocks=16, budget=100)
    first = add(scheduler, 1, 32)
    second = add(scheduler, 2, 32)
    second.token_ids[:] = first.token_ids
    run(scheduler)
    assert list(scheduler.running) == [first]  # 8 blocks are used, 8 are free, and one of them stays so
    run(scheduler)
    assert list(scheduler.running) == [first, second]
    assert second.num_cached_tokens == 28
    assert first.num_preemptions == second.num_preemptions == 0


def test_a_blocked_head_is_not_looked_up_again_until_blocks_are_freed() -> None:
    scheduler = make_scheduler(num_blocks=8, budget=100)
    add(scheduler, 1, 20)
    add(scheduler, 2, 16)
    lookups = 0
    find = scheduler.kv_cache._find_prefix

    def counted(request: Request) -> tuple[list[int], int]:
        nonlocal lookups
        lookups += 1
        return find(request)

    scheduler.kv_cache._find_prefix = counted  # type: ignore[method-assign]
    run(scheduler, 8)
    assert lookups == 2
