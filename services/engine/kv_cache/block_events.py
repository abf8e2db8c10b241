"""What changed in the prefix cache since somebody last asked: the net of blocks stored and evicted."""

from collections.abc import Iterable, Set
from itertools import islice


class BlockEvents:
    """A hash that was stored and evicted again in between is in neither set, so that neither outgrows the pool."""

    def __init__(self) -> None:
        self._stored: set[int] = set()
        self._evicted: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._stored or self._evicted)

    @property
    def stored(self) -> Set[int]:
        return self._stored

    @property
    def evicted(self) -> Set[int]:
        return self._evicted

    def store(self, block_hash: int) -> None:
        if block_hash in self._evicted:
            self._evicted.discard(block_hash)
        else:
            self._stored.add(block_hash)

    def evict(self, block_hash: int) -> None:
        if block_hash in self._stored:
            self._stored.discard(block_hash)
        else:
            self._evicted.add(block_hash)

    def add(self, later: "BlockEvents") -> None:
        """Go on with what happened after these."""
        for block_hash in later.evicted:
            self.evict(block_hash)
        for block_hash in later.stored:
            self.store(block_hash)

    def replace(self, stored: Iterable[int]) -> None:
        """Start over: everything the cache holds now. A reader that was already told of a block since evicted still
        has to hear of that."""
        self._stored = set(stored)
        self._evicted -= self._stored

    def take(self, limit: int) -> tuple[list[int], list[int]]:
        """Stored and evicted hashes, at most `limit` of each; the rest stays for the next call."""
        return _take(self._stored, limit), _take(self._evicted, limit)


def _take(hashes: set[int], limit: int) -> list[int]:
    if not hashes:
        return []
    taken = list(hashes) if len(hashes) <= limit else list(islice(hashes, limit))
    hashes.difference_update(taken)
    return taken
