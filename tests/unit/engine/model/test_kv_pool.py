"""The KV pool's memory: zeros, aligned, and not used before blocks are."""

import sys
from pathlib import Path

import pytest
import torch

from services.engine.model.kv_pool import KVLayer, KVPool

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


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_large_pool_takes_no_memory_before_it_is_used() -> None:
    def used() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024

    before = used()
    # Tensors over 32 MiB: the C library maps smaller ones into memory that the process may have used before.
    pool = KVPool([KVLayer(8, 128)] * 10, num_blocks=2000, block_size=16, dtype=torch.bfloat16, device=CPU)
    size = sum(tensor.nbytes for tensor in pool.keys + pool.values)
    assert size > 600e6
    assert used() - before < 0.1 * size
