"""Which prefix blocks an engine holds, as far as this process knows, and the names of a prompt's blocks.

`connection` keeps one index for each engine, from what the engine publishes; `prefix_aware` looks prompts up in it.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

from shared.block_hash import iterate_prefix_hashes

# All of it runs on the event loop, at 2 ms for a prompt of this many blocks. Engines that hold more are equals.
MAX_BLOCKS_LOOKED_UP = 1024
# A request that was sent but not yet computed: its blocks count as held for so long.
EXPECTED_SECONDS = 10.0
# Names of a prompt's blocks made at once, which is cheaper than one by one.
_NAMED_AT_ONCE = 8
# Where an engine does not say how many blocks its cache has.
DEFAULT_CAPACITY = 100_000


class PromptBlocks:
    """The names of a prompt's full blocks, made a few ahead of the one asked for, MAX_BLOCKS_LOOKED_UP at most."""

    def __init__(self, token_ids: Sequence[int], block_size: int, cache_salt: str) -> None:
        self._count = min(len(token_ids) // block_size, MAX_BLOCKS_LOOKED_UP)
        self._hashes: list[int] = []
        self._rest = iterate_prefix_hashes(token_ids, block_size, cache_salt)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        self._name(self._count)
        return iter(self._hashes)

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self._count:
            raise IndexError(index)
        if index >= len(self._hashes):
            self._name(min(index + _NAMED_AT_ONCE, self._count))
        return self._hashes[index]

    def _name(self, count: int) -> None:
        self._hashes += islice(self._rest, count - len(self._hashes))


class PrefixIndex:
    """The block hashes of one engine. It holds no more of them than twice the engine's own blocks, whatever the
    engine says; `clock` is in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._capacity = DEFAULT_CAPACITY
        self._held: set[int] = set()
        # What was sent there, and until when that may be believed: the oldest first.
        self._expected: dict[int, float] = {}

    def __len__(self) -> int:
        return len(self._held) + len(self._expected)

    def __contains__(self, hash_: int) -> bool:
        return hash_ in self._held or (hash_ in self._expected and self._expected[hash_] > self._clock())

    def reset(self, capacity: int = 0) -> None:
        """Know nothing. `capacity` is the number of the engine's blocks, or 0 where that is not known."""
        self._capacity = capacity or DEFAULT_CAPACITY
        self._held = set()
        self._expected = {}

    def update(self, stored: Sequence[int], evicted: Sequence[int]) -> None:
        """The engine tells what changed in its cache; a hash is never in both."""
        if stored:
            self._held.update(stored)
            if self._expected:
                for hash_ in stored:
                    self._expected.pop(hash_, None)
        if evicted:
            self._held.difference_update(evicted)
        # Large changes come in parts, of which an eviction may be the last: hence twice.
        if len(self._held) > 2 * self._capacity:
            self._held = set()

    def expect(self, hashes: Iterable[int]) -> None:
        """The engine was just sent a prompt with these blocks and will hold them soon."""
        now = self._clock()
        expected = self._expected
        for hash_ in hashes:
            if hash_ not in self._held:
                expected.pop(hash_, None)
                expected[hash_] = now + EXPECTED_SECONDS
        while expected:
            oldest = next(iter(expected))
            if expected[oldest] > now and len(expected) <= self._capacity:
                return
            del expected[oldest]
