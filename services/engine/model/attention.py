"""Attention over the paged KV cache: the interface, and the PyTorch implementation that runs anywhere.

Faster ones: cpu_attention.py (C kernels) and cuda_attention.py (flash attention); choose_attention picks.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from services.engine.model.batch import Batch
from services.engine.model.kv_pool import KVPool


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """`window` counts the positions that a token sees, itself included (None: all before it). Scores are
    multiplied with `scale` and then, where there is a `soft_cap` c (Gemma 2), squashed to c * tanh(score / c)."""

    scale: float
    window: int | None = None
    soft_cap: float | None = None


class Attention(Protocol):
    """Causal attention of a batch's rows over their sequences' cached keys and values."""

    @property
    def pool(self) -> KVPool: ...

    def attend(self, query: Tensor, layer: int, batch: Batch, options: AttentionOptions) -> Tensor:
        """query [rows, q_heads, head_dim] -> the same shape. The batch's keys and values are stored already;
        rows of padding come back as zeros."""
        ...


class TorchAttention:
    """Gathers each sequence's blocks, then PyTorch's SDPA: the decodes in one batch, then prefill by prefill.

    The query heads that share a KV head become its query rows, which is several times faster on a CPU than
    repeating the KV heads (`enable_gqa`).
    """

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool

    @property
    def pool(self) -> KVPool:
        return self._pool

    def attend(self, query: Tensor, layer: int, batch: Batch, options: AttentionOptions) -> Tensor:
        out = torch.zeros_like(query)
        decodes = batch.num_decodes
        if decodes:
            out[:decodes] = self._decode(query[:decodes], layer, batch, options)
        row = decodes
        for i in range(decodes, len(batch.query_lens_list)):
            end = row + batch.query_lens_list[i]
            out[row:end] = self._prefill(query[row:end], layer, batch, i, options)
            row = end
        return out

    def _decode(self, query: Tensor, layer: int, batch: Batch, options: AttentionOptions) -> Tensor:
        sequences, q_heads, head_dim = query.shape
        longest = max(batch.context_lens_list[:sequences])
        key, value = self._gather(layer, batch.block_tables[:sequences], longest)
        lengths = batch.context_lens[:sequences, None]
        positions = torch.arange(longest, device=query.device)[None, :]
        visible = positions < lengths
        if options.window is not None:
            visible &= positions >= lengths - options.window
        # What lies beyond a sequence's end is another's, and may be NaN, which neither a mask nor a weight of zero
        # silences.
        hidden = ~visible[:, None, :, None]
        key, value = key.masked_fill(hidden, 0), value.masked_fill(hidden, 0)
        query = query.view(sequences, key.shape[1], -1, head_dim)
        return _attention(query, key, value, visible[:, None, None, :], options).reshape(sequences, q_heads, head_dim)

    def _prefill(self, query: Tensor, layer: int, batch: Batch, i: int, options: AttentionOptions) -> Tensor:
        rows, q_heads, head_dim = query.shape
        length = batch.context_lens_list[i]
        key, value = self._gather(layer, batch.block_tables[i : i + 1], length)
        kv_heads = key.shape[1]
        group = q_heads // kv_heads
        positions = torch.arange(length, device=query.device)[None, :]
        own = torch.arange(length - rows, length, device=query.device)[:, None]
        visible = positions <= own
        if options.window is not None:
            visible &= positions > own - options.window
        query = query.view(rows, kv_heads, group, head_dim).permute(1, 2, 0, 3).reshape(1, kv_heads, -1, head_dim)
        out = _attention(query, key, value, visible.repeat(group, 1)[None, None], options)
        return out.view(kv_heads, group, rows, head_dim).permute(2, 0, 1, 3).reshape(rows, q_heads, head_dim)

    def _gather(self, layer: int, block_tables: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values [sequences, kv_heads, length, head_dim] of the sequences' first `length` positions."""
        blocks = block_tables[:, : -(-length // self._pool.block_size)]
        key = self._pool.keys[layer][blocks].flatten(1, 2)[:, :length].transpose(1, 2)
        value = self._pool.values[layer][blocks].flatten(1, 2)[:, :length].transpose(1, 2)
        return key, value


def _attention(query: Tensor, key: Tensor, value: Tensor, visible: Tensor, options: AttentionOptions) -> Tensor:
    if options.soft_cap is None:
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=visible, scale=options.scale)
    scores = (query @ key.transpose(-1, -2)).float() * options.scale
    scores = options.soft_cap * torch.tanh(scores / options.soft_cap)
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return weights.to(value.dtype) @ value
