"""The block pool: whatever is done to it in whatever order, its accounts agree and content is never mixed up."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.engine.kv_cache.block_events import BlockEvents
from services.engine.kv_cache.block_pool import BlockAccountError, BlockPool, OutOfBlocks

NUM_BLOCKS = 6


class PoolMachine(RuleBasedStateMachine):
    """A model of the pool: who holds what, and what each block's content was when it was stored."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.held: list[int] = []
        self.stored: dict[int, tuple[int, bytes]] = {}  # block: hash, content
        self.published: set[int] = set()

    @precondition(lambda self: self.pool.num_free)
    @rule()
    def take(self) -> None:
        block = self.pool.take()
        assert block not in self.held
        self.held.append(block)
        self.stored.pop(block, None)

    @precondition(lambda self: not self.pool.num_free)
    @rule()
    def take_too_many(self) -> None:
        with pytest.raises(OutOfBlocks):
            self.pool.take()

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.held))
        self.held.remove(block)
        self.pool.give_back([block])

    @precondition(lambda self: any(block not in self.stored for block in self.held))
    @rule(data=st.data(), content=st.binary(min_size=1, max_size=1))
    def store(self, data: st.DataObject, content: bytes) -> None:
        block = data.draw(st.sampled_from([block for block in self.held if block not in self.stored]))
        block_hash = content[0] % 3  # collisions happen
        self.pool.store(block, block_hash, "salt", content)
        owner = self.pool.block_of(self.pool.find(block_hash, "salt", content))  # type: ignore[arg-type]
        if owner == block:
            for other, (other_hash, _) in list(self.stored.items()):
                if other_hash == block_hash:
                    del self.stored[other]
            self.stored[block] = (block_hash, content)
        else:
            assert self.stored[owner] == (block_hash, content)

    @rule(content=st.binary(min_size=1, max_size=1))
    def find_and_share(self, content: bytes) -> None:
        found = self.pool.find(content[0] % 3, "salt", content)
        expected = [block for block, (_, known) in self.stored.items() if known == content]
        if found is None:
            assert expected == []
        else:
            assert expected == [self.pool.block_of(found)]
            self.pool.share(expected[0])
            self.held.append(expected[0])

    @rule()
    def take_events(self) -> None:
        stored, evicted = self.pool.events.take(1000)
        assert not set(stored) & set(evicted)
        assert self.published >= set(evicted)
        assert not self.published & set(stored)
        self.published = (self.published - set(evicted)) | set(stored)
        assert self.published == set(self.pool.stored_hashes())

    @invariant()
    def accounts_agree(self) -> None:
        self.pool.check(Counter(self.held))
        assert self.pool.num_free == NUM_BLOCKS - len(set(self.held))
        assert len(self.pool.events.stored) <= NUM_BLOCKS
        assert len(self.pool.events.evicted) <= NUM_BLOCKS


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_the_longest_unused_content_goes_first() -> None:
    pool = BlockPool(3)
    blocks = [pool.take() for _ in range(3)]
    for block in blocks:
        pool.store(block, block, "", bytes([block]))
    pool.give_back([blocks[1], blocks[0], blocks[2]])
    assert [pool.take() for _ in range(3)] == [blocks[1], blocks[0], blocks[2]]


def test_blocks_without_content_are_reused_before_content_is_lost() -> None:
    pool = BlockPool(2)
    kept, scratch = pool.take(), pool.take()
    pool.store(kept, 1, "", b"a")
    pool.give_back([kept])
    pool.give_back([scratch])
    assert pool.take() == scratch
    assert pool.find(1, "", b"a") is not None


def test_a_colliding_hash_is_no_hit() -> None:
    pool = BlockPool(2)
    pool.store(pool.take(), 1, "", b"a")
    assert pool.find(1, "", b"b") is None
    assert pool.find(1, "other salt", b"a") is None
    assert pool.find(1, 7, b"a") is None


def test_a_serial_never_comes_again() -> None:
    pool = BlockPool(1)
    first = pool.store(pool.take(), 1, "", b"a")
    pool.give_back([0])
    pool.take()
    assert pool.store(0, 1, "", b"a").serial != first.serial


def test_giving_back_twice_is_found() -> None:
    pool = BlockPool(1)
    pool.give_back([pool.take()])
    with pytest.raises(BlockAccountError, match="more often"):
        pool.give_back([0])


def test_a_leak_is_found_and_named() -> None:
    pool = BlockPool(2)
    block = pool.take()
    with pytest.raises(BlockAccountError, match=f"block {block} counts 1 users and has 0"):
        pool.check({})


def test_an_empty_pool_is_refused() -> None:
    with pytest.raises(ValueError, match="num_kv_blocks"):
        BlockPool(0)


def test_events_are_the_net_change() -> None:
    events = BlockEvents()
    events.store(1)
    events.evict(1)
    events.evict(2)
    events.store(2)
    assert not events
    events.store(3)
    later = BlockEvents()
    later.evict(3)
    later.store(4)
    events.add(later)
    assert events.take(10) == ([4], [])


def test_events_come_in_parts() -> None:
    events = BlockEvents()
    for block_hash in range(5):
        events.store(block_hash)
    parts = [events.take(2)[0] for _ in range(4)]
    assert [len(part) for part in parts] == [2, 2, 1, 0]
    assert sorted(block_hash for part in parts for block_hash in part) == list(range(5))


def test_starting_over_keeps_the_evictions_that_the_reader_has_not_heard_of() -> None:
    events = BlockEvents()
    events.store(1)
    events.store(2)
    assert events.take(10) == ([1, 2], [])
    events.evict(1)
    events.replace([2, 3])
    stored, evicted = events.take(10)
    assert (set(stored), evicted) == ({2, 3}, [1])
