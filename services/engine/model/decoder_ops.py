"""What the native decoder does between its matrix products: the interface, and the PyTorch implementation.

cpu_decoder_ops.py has the same as C kernels. Attention is apart, in attention.py.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from services.engine.model.batch import Batch
from services.engine.model.kv_pool import KVPool


@dataclass(frozen=True, slots=True)
class Heads:
    """How a layer's fused projection splits: query heads, then key heads, then value heads."""

    query: int
    kv: int
    dim: int
    query_norm: Tensor | None  # [dim]; Qwen3 norms each head before the rotation
    key_norm: Tensor | None


class DecoderOps(Protocol):
    """All rows are independent of each other. Nothing is changed in place but what a docstring names."""

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor: ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Adds x to `residual` in place and returns its norm."""
        ...

    def rotate_and_store(
        self,
        qkv: Tensor,
        heads: Heads,
        epsilon: float,
        cos: Tensor,
        sin: Tensor,
        batch: Batch,
        pool: KVPool,
        layer: int,
    ) -> Tensor:
        """qkv [rows, (query + 2 kv) * dim] -> rotated queries [rows, query, dim]; keys (rotated) and values go to
        their slots of the pool. cos and sin [positions, dim / 2] are the rotary tables."""
        ...

    def silu_and_multiply(self, gate_up: Tensor) -> Tensor:
        """[rows, 2 * size], gate first -> [rows, size]."""
        ...


class TorchDecoderOps:
    """Plain PyTorch, for GPUs and for CPUs without a C compiler. Rounds where transformers' models round."""

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
        return wide.to(x.dtype) * weight

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        residual += x
        return self.rms_norm(residual, weight, epsilon)

    def rotate_and_store(
        self,
        qkv: Tensor,
        heads: Heads,
        epsilon: float,
        cos: Tensor,
        sin: Tensor,
        batch: Batch,
        pool: KVPool,
        layer: int,
    ) -> Tensor:
        query, key, value = qkv.view(len(qkv), -1, heads.dim).split((heads.query, heads.kv, heads.kv), dim=1)
        if heads.query_norm is not None:
            query = self.rms_norm(query, heads.query_norm, epsilon)
        if heads.key_norm is not None:
            key = self.rms_norm(key, heads.key_norm, epsilon)
        row_cos, row_sin = cos[batch.positions, None], sin[batch.positions, None]
        key = _rotate(key, row_cos, row_sin)
        pool.write(layer, key[: batch.num_tokens], value[: batch.num_tokens], batch.slots)
        return _rotate(query, row_cos, row_sin)

    def silu_and_multiply(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate) * up


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)
