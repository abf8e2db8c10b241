"""Attention on an NVIDIA GPU by flash attention: torch.nn.attention.varlen.

Where the flash attention that PyTorch dispatches to reads a block table (FlashAttention 3 does, with blocks of any
size; PyTorch's built-in FlashAttention 2 may refuse, or want blocks of 256), keys and values are read in place; else
each step gathers them first. Which one it is, is found out once, by trying.
"""

import logging
from typing import Any

import torch
from torch import Tensor

from services.engine.model.attention import AttentionOptions, TorchAttention
from services.engine.model.batch import Batch
from services.engine.model.kv_pool import KVPool

logger = logging.getLogger(__name__)

_MAX_HEAD_DIM = 256
_HEAD_DIM_MULTIPLE = 8
_OLDEST_GPU = (8, 0)  # Ampere


def varlen_handles(head_dim: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether flash attention computes such a layer on this GPU, and this PyTorch has it."""
    try:
        import torch.nn.attention.varlen
    except ImportError:
        return False
    if torch.cuda.get_device_capability(device) < _OLDEST_GPU:
        return False
    return dtype in (torch.bfloat16, torch.float16) and head_dim <= _MAX_HEAD_DIM and head_dim % _HEAD_DIM_MULTIPLE == 0


class VarlenAttention:
    """Layers with a soft cap, which this interface does not take, run through TorchAttention."""

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool
        self._torch = TorchAttention(pool)
        self._reads_block_tables = self._try_block_tables()
        if not self._reads_block_tables:
            logger.info("Flash attention reads no block tables here: each step gathers the KV cache first.")

    @property
    def pool(self) -> KVPool:
        return self._pool

    def attend(self, query: Tensor, layer: int, batch: Batch, options: AttentionOptions) -> Tensor:
        if options.soft_cap is not None:
            return self._torch.attend(query, layer, batch, options)
        out = torch.zeros_like(query) if batch.num_tokens < len(query) else None
        rows = self._varlen(query[: batch.num_tokens], layer, batch, options)
        if out is None:
            return rows
        out[: batch.num_tokens] = rows
        return out

    def _varlen(self, query: Tensor, layer: int, batch: Batch, options: AttentionOptions) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        keys, values = self._pool.keys[layer], self._pool.values[layer]
        shared: dict[str, Any] = {
            "scale": options.scale,
            # (left, right): how many positions before and after its own a row sees.
            "window_size": (-1 if options.window is None else options.window - 1, 0),
            "enable_gqa": query.shape[1] != keys.shape[2],
        }
        longest_query, longest = max(batch.query_lens_list), max(batch.context_lens_list)
        if self._reads_block_tables:
            # One split: with more, the order of summation depends on the longest sequence of the batch.
            out = varlen_attn(
                query,
                keys,
                values,
                batch.query_starts,
                None,
                longest_query,
                longest,
                seqused_k=batch.context_lens,
                block_table=batch.block_tables,
                num_splits=1,
                **shared,
            )
            assert isinstance(out, Tensor)  # a pair only where the log-sum-exp is asked for
            return out
        key_starts = torch.zeros_like(batch.query_starts)
        key_starts[1:] = batch.context_lens.cumsum(0)
        slots = self._context_slots(batch, key_starts)
        key, value = keys.flatten(0, 1)[slots], values.flatten(0, 1)[slots]
        out = varlen_attn(query, key, value, batch.query_starts, key_starts, longest_query, longest, **shared)
        assert isinstance(out, Tensor)  # a pair only where the log-sum-exp is asked for
        return out

    def _context_slots(self, batch: Batch, key_starts: Tensor) -> Tensor:
        """The slots of all sequences' contexts, one after another."""
        size = self._pool.block_size
        total = sum(batch.context_lens_list)
        sequence = torch.repeat_interleave(
            torch.arange(len(batch.context_lens), device=key_starts.device), batch.context_lens, output_size=total
        )
        position = torch.arange(total, device=key_starts.device) - key_starts[sequence]
        return batch.block_tables[sequence, position // size].long() * size + position % size

    def _try_block_tables(self) -> bool:
        from torch.nn.attention import varlen

        keys = self._pool.keys[0]
        device = keys.device
        if torch.cuda.get_device_capability(device)[0] == 9:
            _activate_flash_attention_3()
        starts = torch.tensor([0, 1], dtype=torch.int32, device=device)
        try:
            varlen.varlen_attn(
                keys[0, :1],
                keys[:1],
                self._pool.values[0][:1],
                starts,
                None,
                1,
                1,
                window_size=(-1, 0),
                seqused_k=starts[1:],
                block_table=torch.zeros(1, 1, dtype=torch.int32, device=device),
                num_splits=1,
            )
            torch.cuda.synchronize(device)
        except (RuntimeError, TypeError, ValueError):
            return False
        return True


def _activate_flash_attention_3() -> None:
    """FlashAttention 3 is a package apart, for Hopper GPUs; where it is installed, varlen_attn should use it."""
    try:
        from torch.nn.attention import activate_flash_attention_impl

        activate_flash_attention_impl("FA3")
    except Exception as error:  # not installed, or built for another CUDA
        logger.info("FlashAttention 3 is not used: %s", str(error).split("\n")[0])
