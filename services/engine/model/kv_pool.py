"""The paged KV cache's memory: for each layer, keys and values `[num_blocks, block_size, kv_heads, head_dim]`.

The scheduler hands out block ids; a slot is `block * block_size + offset`. Attention reads it through block tables.
"""

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.engine.model.available_memory import available_memory
from services.engine.model.page_memory import fresh_pages, populate

PIECE_BYTES = 2 << 20  # a huge page: about 0.1 ms, or 5 where a virtual machine's host has to find it first
KEPT_FREE_BYTES = 512 << 20  # for the process's own growth, and for others

logger = logging.getLogger(__name__)


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
        self._untaken = _pieces([*self.keys, *self.values]) if device.type == "cpu" else iter(())

    def take_memory(self) -> bool:
        """Take the next piece of memory that the system would else give when a step first writes to it, in the order
        in which blocks are used first. False: there is nothing more to take."""
        piece = next(self._untaken, None)
        if piece is None:
            return False
        available = available_memory()
        try:
            if available is not None and available < KEPT_FREE_BYTES:
                raise OSError(f"{available >> 20} MiB are available")
            if populate(*piece):
                return True
        except OSError as error:
            logger.warning(
                "The rest of the KV cache is taken only as it is used, and may then not be there: %s. "
                "Lower --kv-cache-memory, or give the engine more memory.",
                error,
            )
        self._untaken = iter(())
        return False

    def close(self) -> None:
        """Give the memory back."""
        self._untaken = iter(())
        self.keys.clear()
        self.values.clear()

    def write(self, layer: int, key: Tensor, value: Tensor, slots: Tensor) -> None:
        """Store keys and values [tokens, kv_heads, head_dim] in their slots [tokens]."""
        self.keys[layer].flatten(0, 1).index_copy_(0, slots, key)
        self.values[layer].flatten(0, 1).index_copy_(0, slots, value)


def _pieces(tensors: list[Tensor]) -> Iterator[tuple[int, int]]:
    """Addresses and sizes; as long as there are more, the tensors stay."""
    places = [(tensor.data_ptr(), tensor.nbytes) for tensor in tensors]
    for start in range(0, max(size for _, size in places), PIECE_BYTES):
        for address, size in places:
            if start < size:
                yield address + start, min(PIECE_BYTES, size - start)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # torch.zeros writes them: here pages become memory when they are used.
    size = math.prod(shape) * dtype.itemsize
    return torch.frombuffer(fresh_pages(size), dtype=torch.uint8, count=size).view(dtype).view(shape)
