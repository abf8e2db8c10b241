"""Attention on a CPU by the C kernel (kernels/paged_attention.c): prefills and decodes in one call a layer."""

import ctypes

import torch
from torch import Tensor

from services.engine.model.attention import AttentionOptions
from services.engine.model.batch import Batch
from services.engine.model.kernel_structures import AttentionArguments
from services.engine.model.kernels import DTYPE_SUFFIXES, MAX_HEAD_DIM, MAX_QUERY_GROUP, Kernels
from services.engine.model.kv_pool import KVPool


def kernel_handles(q_heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> bool:
    """Whether the kernel was written for such a layer."""
    return dtype in DTYPE_SUFFIXES and head_dim <= MAX_HEAD_DIM and q_heads // kv_heads <= MAX_QUERY_GROUP


class KernelAttention:
    """Each row's result is bit for bit the same whatever else is in the batch, and however a prompt was chunked."""

    def __init__(self, pool: KVPool, kernels: Kernels) -> None:
        self._pool = pool
        self._attend = getattr(kernels.long, f"attend_{DTYPE_SUFFIXES[pool.keys[0].dtype]}")
        self._attend.argtypes = [ctypes.POINTER(AttentionArguments)]
        self._attend.restype = None

    @property
    def pool(self) -> KVPool:
        return self._pool

    def attend(self, query: Tensor, layer: int, batch: Batch, options: AttentionOptions) -> Tensor:
        query = query.contiguous()
        out = torch.empty_like(query)
        if batch.num_tokens < len(out):
            out[batch.num_tokens :] = 0
        keys, values = self._pool.keys[layer], self._pool.values[layer]
        sequences, table_width = batch.block_tables.shape
        item_starts = torch.empty(sequences + 1, dtype=torch.int64)
        self._attend(
            AttentionArguments(
                query.data_ptr(),
                keys.data_ptr(),
                values.data_ptr(),
                out.data_ptr(),
                batch.query_starts.data_ptr(),
                batch.context_lens.data_ptr(),
                batch.block_tables.data_ptr(),
                item_starts.data_ptr(),
                sequences,
                table_width,
                self._pool.block_size,
                query.shape[1],
                keys.shape[2],
                keys.shape[3],
                options.window or 0,
                options.scale,
                options.soft_cap or 0.0,
            )
        )
        return out
