"""The KV pool's memory: zeros, aligned, and not used before blocks are."""

import sys

import pytest
import torch

from services.engine.model.kv_pool import KVLayer, KVPool
from tests.unit.engine.model.resident_memory import resident_bytes

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_blocks_are_zeros_that_can_be_written(dtype: torch.dtype) -> None:
    pool = KVPool([KVLayer(3, 5), KVLayer(1, 8)], num_blocks=7, block_size=4, dtype=dtype, device=CPU)
    for tensor, shape in zip(pool.keys + pool.values, [(7, 4, 3, 5), (7, 4, 1, 8)] * 2, strict=True):
        assert (tensor.shape, tensor.dtype) == (shape, dtype)
        assert tensor.is_contiguous()
        assert tensor.data_ptr() % 64 == 0
        assert not tensor.any()
    ones = torch.ones(2, 3, 5, dtype=dtype)
    pool.write(0, ones, ones * 2, torch.tensor([27, 5]))
    assert pool.keys[0].sum() == 30
    assert pool.values[0][6, 3].sum() == 30


@pytest.mark.skipif(sys.platform != "linux", reason="mincore is Linux's")
def test_a_large_pool_takes_no_memory_before_it_is_used() -> None:
    used_and_freed = [torch.ones(7_000_000) for _ in range(30)]  # under 32 MiB: the C library keeps it for the next
    del used_and_freed
    pool = KVPool([KVLayer(8, 128)] * 10, num_blocks=2000, block_size=16, dtype=torch.bfloat16, device=CPU)
    tensors = pool.keys + pool.values
    assert sum(tensor.nbytes for tensor in tensors) > 600e6
    # Huge pages that hold a tensor's edge come whole.
    assert sum(map(resident_bytes, tensors)) < 0.1 * sum(tensor.nbytes for tensor in tensors)
    pool.keys[3].fill_(1)
    assert resident_bytes(pool.keys[3]) > 0.99 * pool.keys[3].nbytes
