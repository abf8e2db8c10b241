"""Prefix hits: only what is computed, final, full, and really the same prompt of the same tenant."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.engine.kv_cache import KVCache, cache
from services.engine.request import Request, RequestKey
from shared.sampling_params import SamplingParams


def make_request(token_ids: list[int], salt: str = "") -> Request:
    return Request(RequestKey(b"peer", 1), list(token_ids), len(token_ids), SamplingParams(), cache_salt=salt)


def compute(kv_cache: KVCache, request: Request, up_to: int | None = None) -> None:
    request.num_computed_tokens = len(request.token_ids) if up_to is None else up_to
    kv_cache.store_computed(request)


def hits(kv_cache: KVCache, token_ids: list[int], salt: str = "") -> int:
    """Tokens that a new request would not have to compute."""
    request = make_request(token_ids, salt)
    assert kv_cache.admit(request)
    hit = request.num_computed_tokens
    kv_cache.release(request)
    return hit


def test_a_prefix_is_shared_by_whole_blocks() -> None:
    kv_cache = KVCache(16, 4)
    first = make_request(list(range(10)))
    assert kv_cache.admit(first)
    compute(kv_cache, first)
    second = make_request([*range(8), 50, 51, 52])
    assert kv_cache.admit(second)
    assert second.num_computed_tokens == 8
    assert second.block_table[:2] == first.block_table[:2]
    assert second.block_table[2] != first.block_table[2]
    kv_cache.check([first, second])


@pytest.mark.parametrize(("length", "expected"), [(7, 4), (8, 4), (9, 8), (4, 0), (1, 0)])
def test_the_last_token_is_always_computed_again(length: int, expected: int) -> None:
    kv_cache = KVCache(16, 4)
    request = make_request(list(range(length)))
    assert kv_cache.admit(request)
    compute(kv_cache, request)
    assert hits(kv_cache, list(range(length))) == expected


def test_blocks_are_shared_only_once_computed() -> None:
    kv_cache = KVCache(16, 4)
    request = make_request(list(range(13)))
    assert kv_cache.admit(request)
    assert hits(kv_cache, list(range(13))) == 0
    compute(kv_cache, request, up_to=7)
    assert hits(kv_cache, list(range(13))) == 4
    compute(kv_cache, request, up_to=12)
    assert hits(kv_cache, list(range(13))) == 12


def test_a_salt_separates_tenants() -> None:
    kv_cache = KVCache(16, 4)
    request = make_request(list(range(9)), salt="tenant a")
    assert kv_cache.admit(request)
    compute(kv_cache, request)
    assert hits(kv_cache, list(range(9)), salt="tenant a") == 8
    assert hits(kv_cache, list(range(9)), salt="tenant b") == 0
    assert hits(kv_cache, list(range(9))) == 0


def test_colliding_hashes_never_mix_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "block_hash", lambda parent, token_ids: 7)
    kv_cache = KVCache(16, 4)
    request = make_request([1, 1, 1, 1, 2, 2, 2, 2, 9])
    assert kv_cache.admit(request)
    compute(kv_cache, request)
    assert hits(kv_cache, [3, 3, 3, 3, 2, 2, 2, 2, 9]) == 0
    kv_cache.check([request])


def test_a_child_is_not_found_behind_another_parent_of_the_same_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    # First blocks all collide; second blocks are named after their tokens alone.
    monkeypatch.setattr(cache, "block_hash", lambda parent, token_ids: token_ids[0] if parent else 1000)
    kv_cache = KVCache(16, 4)
    one = make_request([1, 1, 1, 1, 5, 5, 5, 5, 9])
    assert kv_cache.admit(one)
    compute(kv_cache, one)
    other = make_request([2, 2, 2, 2, 6, 6, 6, 6, 9])
    assert kv_cache.admit(other)
    compute(kv_cache, other)  # takes the colliding name of `one`'s first block
    assert hits(kv_cache, [2, 2, 2, 2, 5, 5, 5, 5, 9]) == 4
    kv_cache.check([one, other])


def test_equal_prompts_computed_at_once_stay_apart_and_are_shared_later() -> None:
    kv_cache = KVCache(16, 4)
    one, other = make_request(list(range(9))), make_request(list(range(9)))
    assert kv_cache.admit(one)
    assert kv_cache.admit(other)
    compute(kv_cache, one)
    compute(kv_cache, other)
    assert not set(one.block_table) & set(other.block_table)
    third = make_request(list(range(9)))
    assert kv_cache.admit(third)
    assert third.block_table[:2] == one.block_table[:2]
    kv_cache.check([one, other, third])


def test_a_reserve_stays_free() -> None:
    kv_cache = KVCache(4, 4)
    request = make_request(list(range(12)))
    assert not kv_cache.admit(request, reserve=2)
    assert kv_cache.num_free == 4
    assert kv_cache.admit(request, reserve=1)
    assert kv_cache.num_free == 1


def test_free_hits_count_as_taken() -> None:
    kv_cache = KVCache(3, 4)
    request = make_request(list(range(9)))
    assert kv_cache.admit(request)
    compute(kv_cache, request)
    kv_cache.release(request)
    # Both hits are free blocks: they and the new one are all that there is.
    again = make_request(list(range(9)))
    assert not kv_cache.admit(again, reserve=1)
    assert kv_cache.admit(again)
    assert again.num_computed_tokens == 8
    kv_cache.check([again])


def test_the_end_of_a_sequence_is_reused_before_its_beginning() -> None:
    kv_cache = KVCache(4, 4)
    request = make_request(list(range(16)))
    assert kv_cache.admit(request)
    compute(kv_cache, request)
    kv_cache.release(request)
    scratch = make_request([100] * 4)
    assert kv_cache.admit(scratch)
    assert hits(kv_cache, list(range(12))) == 8


def test_switched_off_nothing_is_shared() -> None:
    kv_cache = KVCache(16, 4, enable_prefix_caching=False)
    request = make_request(list(range(9)))
    assert kv_cache.admit(request)
    compute(kv_cache, request)
    assert hits(kv_cache, list(range(9))) == 0
    assert not kv_cache.pool.events


def test_extend_gives_a_block_when_the_last_is_full() -> None:
    kv_cache = KVCache(2, 4)
    request = make_request(list(range(3)))
    assert kv_cache.admit(request)
    for computed, blocks in [(3, 1), (4, 2), (7, 2)]:
        request.num_computed_tokens = computed
        assert kv_cache.extend(request)
        assert len(request.block_table) == blocks
    request.num_computed_tokens = 8
    assert not kv_cache.extend(request)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 20), st.booleans()), max_size=30))
def test_hits_are_always_the_true_prefix(requests: list[tuple[int, int, bool]]) -> None:
    """Keeps each block's true content aside, as the model's memory would, and compares at every hit."""
    kv_cache = KVCache(8, 2)
    memory: dict[int, tuple[str, list[int]]] = {}
    live: list[Request] = []
    for kind, length, keep in requests:
        salt = "s" if kind == 2 else ""
        request = make_request([kind, *(position % 3 for position in range(length - 1))], salt)
        if not kv_cache.admit(request):
            while live:
                kv_cache.release(live.pop())
            if not kv_cache.admit(request):
                continue
        for index in range(request.num_computed_tokens // 2):
            assert memory[request.block_table[index]] == (salt, request.token_ids[: 2 * index + 2])
        for index in range(request.num_computed_tokens // 2, len(request.block_table)):
            memory[request.block_table[index]] = (salt, request.token_ids[: 2 * index + 2])
        compute(kv_cache, request)
        if keep:
            live.append(request)
        else:
            kv_cache.release(request)
        kv_cache.check(live)
