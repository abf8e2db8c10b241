"""The KV cache's blocks: who uses each, which are free, and which hold content that others may share.

Knows nothing of requests; `cache` gives them blocks out of this pool. Free blocks keep their content, and the
longest unused is taken first (as vLLM and nano-vllm do).
"""

import itertools
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from services.engine.kv_cache.block_events import BlockEvents


class BlockAccountError(Exception):
    """The accounts of blocks contradict each other: a bug, after which no output can be trusted."""


class OutOfBlocks(Exception):
    """A block was asked for when none is free: the scheduler asks for no more than there are."""


@dataclass(slots=True)
class StoredBlock:
    """The content of a shareable block. `parent` is the serial of the block before it, or the cache salt.

    A hash may collide, even on purpose; a serial is given to one content only and never again. So equal
    tokens behind an equal parent are an equal prefix, by induction, whatever the hashes say.
    """

    hash: int
    parent: int | str
    token_ids: bytes
    serial: int


class BlockPool:
    """`num_blocks` blocks with reference counts. Block ids are 0 to num_blocks - 1."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"A KV cache of {num_blocks} blocks holds nothing: raise num_kv_blocks or its memory.")
        self.num_blocks = num_blocks
        self.events = BlockEvents()
        self._references = [0] * num_blocks
        self._stored: list[StoredBlock | None] = [None] * num_blocks
        self._block_of_hash: dict[int, int] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._serials = itertools.count(1)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_stored(self) -> int:
        """Blocks whose content can be shared."""
        return len(self._block_of_hash)

    def is_free(self, block: int) -> bool:
        return self._references[block] == 0

    def take(self) -> int:
        """A block for new content, used once. Whatever it held can no longer be shared."""
        if not self._free:
            raise OutOfBlocks(f"All {self.num_blocks} KV blocks are in use.")
        block, _ = self._free.popitem(last=False)
        stored = self._stored[block]
        if stored is not None:
            self._stored[block] = None
            del self._block_of_hash[stored.hash]
            self.events.evict(stored.hash)
        self._references[block] = 1
        return block

    def share(self, block: int) -> None:
        """One user more for a block that holds content."""
        if self._references[block] == 0:
            del self._free[block]
        self._references[block] += 1

    def give_back(self, blocks: Iterable[int]) -> None:
        """One user less for each. Of those that become free, the first given is taken again the soonest."""
        for block in blocks:
            references = self._references[block] - 1
            if references < 0:
                raise BlockAccountError(f"KV block {block} was given back more often than it was taken.")
            self._references[block] = references
            if references == 0:
                self._free[block] = None
                if self._stored[block] is None:
                    self._free.move_to_end(block, last=False)

    def knows(self, block_hash: int) -> bool:
        """Whether some content has that hash; `find` tells whether it is the one asked for."""
        return block_hash in self._block_of_hash

    def find(self, block_hash: int, parent: int | str, token_ids: bytes) -> StoredBlock | None:
        """The content of that hash, if it is really the one asked for."""
        block = self._block_of_hash.get(block_hash)
        if block is None:
            return None
        stored = self._stored[block]
        if stored is None or stored.parent != parent or stored.token_ids != token_ids:
            return None
        return stored

    def block_of(self, stored: StoredBlock) -> int:
        return self._block_of_hash[stored.hash]

    def store(self, block: int, block_hash: int, parent: int | str, token_ids: bytes) -> StoredBlock:
        """Let others share a full, computed block from now on. Where another block already holds the same
        content, that one stays the shared one and is returned."""
        known = self.find(block_hash, parent, token_ids)
        if known is not None:
            return known
        if self._stored[block] is not None:
            raise BlockAccountError(f"KV block {block} is shared already and cannot get other content.")
        stored = StoredBlock(block_hash, parent, token_ids, next(self._serials))
        other = self._block_of_hash.get(block_hash)
        if other is None:
            self.events.store(block_hash)
        else:
            # A collision, or content behind a parent that is gone: nobody could find the old one any more.
            self._stored[other] = None
        self._block_of_hash[block_hash] = block
        self._stored[block] = stored
        return stored

    def stored_hashes(self) -> list[int]:
        """The hashes of everything that can be shared now."""
        return list(self._block_of_hash)

    def check(self, references: dict[int, int]) -> None:
        """Raise BlockAccountError unless the pool agrees with itself and with `references`, which tells how
        many users each used block has."""
        for block, count in enumerate(self._references):
            if count != references.get(block, 0):
                raise BlockAccountError(f"KV block {block} counts {count} users and has {references.get(block, 0)}.")
            if (count == 0) != (block in self._free):
                raise BlockAccountError(f"KV block {block} has {count} users but is{'' if count else ' not'} free.")
            stored = self._stored[block]
            if stored is not None and self._block_of_hash.get(stored.hash) != block:
                raise BlockAccountError(f"KV block {block} holds shared content that its hash does not lead to.")
        for block_hash, block in self._block_of_hash.items():
            stored = self._stored[block]
            if stored is None or stored.hash != block_hash:
                raise BlockAccountError(f"The hash {block_hash:#x} leads to KV block {block}, which holds another.")
