"""The paged KV cache's memory: for each layer, keys and values `[num_blocks, block_size, kv_heads, head_dim]`.

The scheduler hands out block ids; a slot is `block * block_size + offset`. Attention reads it through block tables.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.engine.model.page_memory import fresh_pages


@dataclass(frozen=True, slots=True)
class KVLayer:
    """What one attention layer keeps for each token."""

    kv_heads: int
    head_dim: int


def block_bytes(layers: Sequence[KVLayer], block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block, all layers' keys and values together."""
    return sum(2 * block_size * layer.kv_heads * layer.head_dim for layer in layers) * dtype.itemsize


class KVPool:
    """Allocated once. Blocks keep what they held until they are written again."""

    def __init__(
        self,
        layers: Sequence[KVLayer],
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        # Zeros, since uninitialised memory may hold NaN, and 0 * NaN is NaN.
        shapes = [(num_blocks, block_size, layer.kv_heads, layer.head_dim) for layer in layers]
        self.keys = [_zeros(shape, dtype, device) for shape in shapes]
        self.values = [_zeros(shape, dtype, device) for shape in shapes]

    def write(self, layer: int, key: Tensor, value: Tensor, slots: Tensor) -> None:
        """Store keys and values [tokens, kv_heads, head_dim] in their slots [tokens]."""
        self.keys[layer].flatten(0, 1).index_copy_(0, slots, key)
        self.values[layer].flatten(0, 1).index_copy_(0, slots, value)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # torch.zeros writes them: here pages become memory when they are used.
    size = math.prod(shape) * dtype.itemsize
    return torch.frombuffer(fresh_pages(size), dtype=torch.uint8, count=size).view(dtype).view(shape)
