"""The KV pool's memory: zeros, aligned, and the system's until blocks are used or it is taken."""

import errno
import logging
import mmap
import sys

import pytest
import torch

from services.engine.model import kv_pool
from services.engine.model.kv_pool import KEPT_FREE_BYTES, PIECE_BYTES, KVLayer, KVPool
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


@pytest.fixture(autouse=True)
def enough_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_pool, "available_memory", lambda: None)


def small_pool() -> KVPool:
    """Tensors that end within a piece."""
    return KVPool([KVLayer(4, 64)] * 2, num_blocks=700, block_size=16, dtype=torch.bfloat16, device=CPU)


@pytest.mark.skipif(sys.platform != "linux", reason="mincore is Linux's")
def test_a_pool_s_memory_is_taken_in_pieces_and_keeps_what_it_holds() -> None:
    pool = small_pool()
    tensors = pool.keys + pool.values
    tensors[1][0].fill_(1)
    assert PIECE_BYTES < tensors[0].nbytes < 3 * PIECE_BYTES
    before = sum(map(resident_bytes, tensors))
    if not pool.take_memory():
        pytest.skip("Linux before 5.14")
    taken = sum(map(resident_bytes, tensors)) - before
    assert taken <= 2 * PIECE_BYTES  # huge pages may begin elsewhere
    pieces = 1
    while pool.take_memory():
        pieces += 1
    assert pieces == 3 * len(tensors)
    assert all(resident_bytes(tensor) > tensor.nbytes - mmap.PAGESIZE for tensor in tensors)
    assert tensors[1].sum() == tensors[1][0].numel()
    assert not any(tensor.any() for tensor in [tensors[0], *tensors[2:]])
    assert not pool.take_memory()


def test_what_cannot_be_taken_is_left_to_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, asked = small_pool(), list[int]()

    def populate(address: int, num_bytes: int) -> bool:
        asked.append(address)
        return False

    monkeypatch.setattr(kv_pool, "populate", populate)
    assert not pool.take_memory()
    assert not pool.take_memory()
    assert asked == [pool.keys[0].data_ptr()]


def no_memory(address: int, num_bytes: int) -> bool:
    raise OSError(errno.ENOMEM, "Cannot allocate memory")


@pytest.mark.parametrize(
    ("available", "reason"),
    [(KEPT_FREE_BYTES - 1, "511 MiB are available"), (None, "[Errno 12] Cannot allocate memory")],
)
def test_memory_that_is_not_there_is_told_once_and_left(
    available: int | None, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pool = small_pool()
    monkeypatch.setattr(kv_pool, "available_memory", lambda: KEPT_FREE_BYTES)
    monkeypatch.setattr(kv_pool, "populate", lambda address, num_bytes: True)
    assert pool.take_memory()
    monkeypatch.setattr(kv_pool, "available_memory", lambda: available)
    monkeypatch.setattr(kv_pool, "populate", no_memory)
    with caplog.at_level(logging.WARNING):
        assert not pool.take_memory()
        assert not pool.take_memory()
    (record,) = caplog.records
    assert reason in record.getMessage()
    assert "--kv-cache-memory" in record.getMessage()


def test_a_closed_pool_takes_nothing() -> None:
    pool = small_pool()
    pool.close()
    assert not pool.take_memory()
