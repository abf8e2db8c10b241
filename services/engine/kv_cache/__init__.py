"""The paged KV cache's book-keeping: blocks, their users, and prefixes that requests share."""

from services.engine.kv_cache.block_events import BlockEvents
from services.engine.kv_cache.block_pool import BlockAccountError
from services.engine.kv_cache.cache import KVCache

__all__ = ["BlockAccountError", "BlockEvents", "KVCache"]
