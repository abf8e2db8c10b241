"""The policy prefix_aware on made-up engines: what it weighs, that it does not herd, and what it costs."""

import random
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest
from test_routing import Engine, NoSink

from services.frontend.engines.prefix_aware import PrefixAware, RoutingWeights
from services.frontend.engines.prefix_index import MAX_BLOCKS_LOOKED_UP, PrefixIndex, PromptBlocks
from services.frontend.generation import Generation
from shared.block_hash import iterate_prefix_hashes, prefix_hashes
from shared.protocol import Load
from shared.sampling_params import SamplingParams


def generation(prompt: list[int], salt: str = "") -> Generation:
    return Generation("model", prompt, SamplingParams(), NoSink(), cache_salt=salt)


def hold(engine: Engine, prompt: list[int], salt: str = "") -> None:
    engine.prefixes.update(prefix_hashes(prompt, engine.block_size, salt), [])


def chosen(engines: list[Engine], prompt: list[int], salt: str = "", **weights: float) -> set[int]:
    return {PrefixAware(RoutingWeights(**weights)).choose(engines, generation(prompt, salt)).name for _ in range(60)}


PROMPT = list(range(1000))


def test_the_names_of_a_prompts_blocks_are_those_that_engines_publish() -> None:
    blocks = PromptBlocks(PROMPT, 16, "tenant")
    assert [blocks[index] for index in range(len(blocks))] == prefix_hashes(PROMPT, 16, "tenant")
    with pytest.raises(IndexError):
        blocks[62]


@pytest.mark.parametrize("held", [16, 100, 128, 130, 500, 999])
def test_the_engine_with_the_longest_prefix_is_chosen(held: int) -> None:
    engines = [Engine(name) for name in range(20)]
    for engine in engines[:10]:
        hold(engine, PROMPT[: held // 2])
    hold(engines[4], PROMPT[:held])
    assert chosen(engines, PROMPT) == {4}


def test_another_salt_and_other_tokens_are_other_prefixes() -> None:
    engines = [Engine(name) for name in range(2)]
    hold(engines[0], PROMPT, "a")
    assert chosen(engines, PROMPT, "a") == {0}
    assert chosen(engines, PROMPT, "b") == {0, 1}
    assert chosen(engines, [7, *PROMPT], "a") == {0, 1}


def test_load_outweighs_a_prefix_when_it_is_larger_by_the_weights() -> None:
    engines = [Engine(name) for name in range(2)]
    hold(engines[0], PROMPT[:320])
    engines[0].load.update(Load(waiting_tokens=600))
    assert chosen(engines, PROMPT) == {0}
    assert chosen(engines, PROMPT, prefix=1.0) == {1}
    engines[0].load.update(Load(waiting_tokens=700))
    assert chosen(engines, PROMPT) == {1}
    assert chosen(engines, PROMPT, load=0.5) == {0}


def test_an_engine_without_room_is_left_to_those_that_have_its_prefix() -> None:
    engines = [Engine(name) for name in range(2)]
    engines[0].load.update(Load(free_blocks=0, total_blocks=100))
    engines[1].load.update(Load(free_blocks=100, total_blocks=100, waiting_tokens=500))
    assert chosen(engines, PROMPT) == {1}
    assert chosen(engines, PROMPT, memory=0.0) == {0}
    hold(engines[0], PROMPT)
    assert chosen(engines, PROMPT) == {0}


def test_engines_of_two_block_sizes_are_each_asked_by_their_own_names() -> None:
    small, large = Engine(0, block_size=16), Engine(1, block_size=64)
    hold(small, PROMPT[:320])
    hold(large, PROMPT[:640])
    assert chosen([small, large], PROMPT) == {1}


def test_what_was_just_sent_counts_as_held_and_only_the_rest_as_work() -> None:
    engines = [Engine(name) for name in range(8)]
    policy = PrefixAware(RoutingWeights())
    first = generation(PROMPT)
    engine = policy.choose(engines, first)
    policy.sent(engine, first, len(PROMPT))
    assert engine.load.queued_tokens == 1000
    second = generation([*PROMPT, 1, 2, 3])
    assert policy.choose(engines, second) is engine
    policy.sent(engine, second, 1003)
    assert engine.load.queued_tokens == 1000 + 1003 - 62 * 16


def test_what_an_engine_never_confirms_is_forgotten_and_a_reset_forgets_all() -> None:
    now = 0.0
    index = PrefixIndex(lambda: now)
    index.reset(100)
    index.expect([1, 2])
    index.update([2, 3], [])
    assert [hash_ in index for hash_ in (1, 2, 3, 4)] == [True, True, True, False]
    now = 11.0
    assert [hash_ in index for hash_ in (1, 2, 3, 4)] == [False, True, True, False]
    index.expect([5])
    assert len(index) == 3
    index.update([], [2])
    assert 2 not in index
    index.reset(100)
    assert len(index) == 0
    assert 3 not in index


def test_the_index_is_bounded_by_the_engines_cache_whatever_the_engine_says() -> None:
    index = PrefixIndex()
    index.reset(100)
    for start in range(0, 10_000, 50):
        index.update(list(range(start, start + 50)), [])
        index.expect(range(1_000_000 + start, 1_000_000 + start + 50))
        assert len(index) <= 300


def test_the_choices_of_one_request_are_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = 0

    def counted(token_ids: Sequence[int], block_size: int, cache_salt: str) -> Iterator[int]:
        nonlocal hashed
        for hash_ in iterate_prefix_hashes(token_ids, block_size, cache_salt):
            hashed += 1
            yield hash_

    monkeypatch.setattr("services.frontend.engines.prefix_index.iterate_prefix_hashes", counted)
    policy = PrefixAware(RoutingWeights())
    engines = [Engine(name) for name in range(4)]
    prompt = list(range(200_000))
    for _ in range(8):
        each = generation(prompt)
        policy.sent(policy.choose(engines, each), each, len(prompt))
    assert hashed == MAX_BLOCKS_LOOKED_UP


@pytest.mark.parametrize("num_engines", [4, 100])
def test_a_decision_on_a_very_long_prompt_does_not_hold_up_the_event_loop(num_engines: int) -> None:
    prompt = [random.randrange(150_000) for _ in range(500_000)]
    engines = [Engine(name) for name in range(num_engines)]
    hashes = prefix_hashes(prompt[: (MAX_BLOCKS_LOOKED_UP + 10) * 16], 16)
    for engine in engines:
        engine.prefixes.update(hashes, [])
    times = []
    for _ in range(7):
        policy = PrefixAware(RoutingWeights())
        each = generation(prompt)
        began = time.thread_time()
        policy.sent(policy.choose(engines, each), each, len(prompt))
        times.append(time.thread_time() - began)
    print(
        f"{num_engines} engines that hold {MAX_BLOCKS_LOOKED_UP * 16:,} tokens of the prompt: "
        f"{min(times) * 1000:.2f} ms a decision"
    )
    assert min(times) < 0.005


def test_frontends_with_stale_views_of_a_popular_prefix_do_not_herd() -> None:
    """60 frontends, 8 engines, one long system prompt held by one engine only at first. Views are refreshed once a
    round, when every engine has worked off what it can; each frontend sends one request a round."""
    system = list(range(1600))
    views = [[Engine(name) for name in range(8)] for _ in range(60)]
    policies = [PrefixAware(RoutingWeights()) for _ in range(60)]
    for view in views:
        hold(view[0], system)
    waiting = [0] * 8
    holders: set[int] = {0}
    shares: Counter[int] = Counter()
    hits = 0
    for round_number in range(40):
        sent: Counter[int] = Counter()
        for view, policy in zip(views, policies, strict=True):
            each = generation([*system, *(random.randrange(100_000) for _ in range(64))])
            engine = policy.choose(view, each)
            policy.sent(engine, each, 1664)
            sent[engine.name] += 1
            hits += engine.name in holders
        holders |= sent.keys()
        for name in range(8):
            waiting[name] = max(0, waiting[name] + sent[name] - 10)
        if round_number >= 10:
            shares.update(sent)
        for view in views:
            for engine in view:
                engine.load.update(
                    Load(waiting_requests=waiting[engine.name], waiting_tokens=64 * waiting[engine.name])
                )
                engine.load.update(
                    Load(waiting_requests=waiting[engine.name], waiting_tokens=64 * waiting[engine.name])
                )
                if engine.name in holders:
                    hold(engine, system)
    mean = statistics.mean(shares[name] for name in range(8))
    print(f"shares of 8 engines: {[round(shares[name] / mean, 2) for name in range(8)]}, hits {hits / 2400:.0%}")
    assert max(shares.values()) < 1.6 * mean
    assert min(shares[name] for name in range(8)) > 0.4 * mean
    assert hits > 0.95 * 2400
