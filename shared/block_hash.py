"""The names of KV-cache blocks: chained 64-bit hashes that the engine publishes and a router can make again.

A name covers the block's tokens, everything before them and the tenant's salt. Two prompts may share a name by
chance or by malice: an engine never trusts a name alone (see kv_cache/block_pool), a router may.
"""

import hashlib
from collections.abc import Sequence

from shared.protocol import pack_token_ids


def root_hash(cache_salt: str = "") -> int:
    """The parent of a sequence's first block."""
    return _digest(cache_salt.encode()) if cache_salt else 0


def block_hash(parent_hash: int, packed_token_ids: bytes) -> int:
    """The name of one full block, from its parent's name and its tokens (`pack_token_ids`)."""
    return _digest(parent_hash.to_bytes(8, "little") + packed_token_ids)


def prefix_hashes(token_ids: Sequence[int], block_size: int, cache_salt: str = "") -> list[int]:
    """The names of all full blocks of a sequence, first to last."""
    hashes: list[int] = []
    parent = root_hash(cache_salt)
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        parent = block_hash(parent, pack_token_ids(token_ids[start : start + block_size]))
        hashes.append(parent)
    return hashes


def _digest(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
