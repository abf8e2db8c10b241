"""What each request holds of the KV cache: prefix hits, room for its tokens, and sharing what it computed.

The scheduler calls this; `block_pool` keeps the blocks themselves.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from services.engine.kv_cache.block_pool import BlockPool
from services.engine.request import Request
from shared.block_hash import block_hash, root_hash
from shared.protocol import pack_token_ids


@dataclass(frozen=True, slots=True)
class _Refused:
    """The request that found too few blocks, the room there was, and the name of the first block that it lacked: it
    is not looked up again before there is more room, or that block is there to be shared."""

    request: Request
    room: int
    missing: int | None


class KVCache:
    """The block tables of all requests. Costs per request and step do not depend on its length: a block is
    hashed once, when it is looked up or when it becomes full."""

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._refused: _Refused | None = None

    @property
    def num_blocks(self) -> int:
        return self.pool.num_blocks

    @property
    def num_free(self) -> int:
        return self.pool.num_free

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that so many tokens fill, the last perhaps in part."""
        return -(-num_tokens // self.block_size)

    def admit(self, request: Request, reserve: int = 0) -> bool:
        """Give a request its prefix hits and room for all its tokens, unless fewer than `reserve` blocks
        would be left free. At least its last token is always left to compute, to sample from.

        Asked again and again for the one that waits first, it costs a look at two numbers until either changed."""
        pool = self.pool
        room = pool.num_free - reserve
        refused = self._refused
        if (
            refused is not None
            and refused.request is request
            and room <= refused.room
            and (refused.missing is None or not pool.knows(refused.missing))
        ):
            return False
        hits, serial = self._find_prefix(request)
        num_new = self.blocks_for(len(request.token_ids)) - len(hits)
        num_taken = num_new + sum(pool.is_free(block) for block in hits)
        if num_taken > room:
            hashes = request.block_hashes
            missing = hashes[len(hits)] if self.shares(request) and len(hits) < len(hashes) else None
            self._refused = _Refused(request, room, missing)
            return False
        self._refused = None
        # Hits first, or a new block might be one of them.
        for block in hits:
            pool.share(block)
        request.block_table = hits + [pool.take() for _ in range(num_new)]
        request.num_computed_tokens = len(hits) * self.block_size
        request.num_stored_blocks = len(hits)
        request.last_stored_serial = serial
        return True

    def extend(self, request: Request) -> bool:
        """Make sure that there is room for one token more than is computed. False: no block is free."""
        if len(request.block_table) * self.block_size > request.num_computed_tokens:
            return True
        if self.pool.num_free == 0:
            return False
        request.block_table.append(self.pool.take())
        return True

    def store_computed(self, request: Request) -> None:
        """Share the blocks that became full with computed tokens."""
        if not self.enable_prefix_caching:
            return
        for index in range(request.num_stored_blocks, request.num_computed_tokens // self.block_size):
            name, token_ids = self._name(request, index)
            stored = self.pool.store(request.block_table[index], name, self._parent(request, index), token_ids)
            request.last_stored_serial = stored.serial
            request.num_stored_blocks = index + 1

    def release(self, request: Request) -> None:
        """Take back all that a request holds; what it computed stays until its blocks are needed."""
        # The end of a sequence is the least likely to be shared: it is reused first.
        self.pool.give_back(reversed(request.block_table))
        request.block_table = []
        request.num_computed_tokens = 0
        request.num_stored_blocks = 0
        request.last_stored_serial = 0

    def check(self, requests: Iterable[Request]) -> None:
        """Raise BlockAccountError unless exactly these requests hold blocks, each as many as it needs."""
        references: Counter[int] = Counter()
        for request in requests:
            references.update(request.block_table)
        self.pool.check(references)

    def _find_prefix(self, request: Request) -> tuple[list[int], int]:
        if not self.shares(request):
            return [], 0
        blocks: list[int] = []
        parent: int | str = request.cache_salt
        for index in range((len(request.token_ids) - 1) // self.block_size):
            name, token_ids = self._name(request, index)
            stored = self.pool.find(name, parent, token_ids)
            if stored is None:
                break
            blocks.append(self.pool.block_of(stored))
            parent = stored.serial
        return blocks, parent if isinstance(parent, int) else 0

    def shares(self, request: Request) -> bool:
        """Whether it takes blocks that others computed. Logprobs of the prompt need every position computed."""
        return self.enable_prefix_caching and request.prompt_logprobs is None

    def _parent(self, request: Request, index: int) -> int | str:
        return request.last_stored_serial if index else request.cache_salt

    def _name(self, request: Request, index: int) -> tuple[int, bytes]:
        """The hash of a full block, and its packed tokens."""
        start = index * self.block_size
        token_ids = pack_token_ids(request.token_ids[start : start + self.block_size])
        hashes = request.block_hashes
        if index == len(hashes):
            hashes.append(block_hash(hashes[-1] if hashes else root_hash(request.cache_salt), token_ids))
        return hashes[index], token_ids
