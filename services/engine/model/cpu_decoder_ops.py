"""The decoder's small operations on a CPU by the C kernels (kernels/decoder_ops.c).

A dozen PyTorch operations a layer cost more in dispatch than in work at a few rows; here they are four calls.
"""

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

from services.engine.model.batch import Batch
from services.engine.model.decoder_ops import Heads
from services.engine.model.kernels import DTYPE_SUFFIXES, Kernels
from services.engine.model.kv_pool import KVPool

_POINTER, _INTEGER, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class KernelDecoderOps:
    """Tensors must be contiguous, of `dtype` (bf16 or float32), and on the CPU."""

    def __init__(self, kernels: Kernels, dtype: torch.dtype) -> None:
        suffix = DTYPE_SUFFIXES[dtype]

        def function(name: str, *arguments: type) -> Callable[..., None]:
            found = getattr(kernels.quick, f"{name}_{suffix}")
            found.argtypes, found.restype = arguments, None
            return found

        self._rms_norm = function("rms_norm", *[_POINTER] * 3, *[_INTEGER] * 2, _FLOAT)
        self._add_rms_norm = function("add_rms_norm", *[_POINTER] * 4, *[_INTEGER] * 2, _FLOAT)
        self._silu_and_multiply = function("silu_and_multiply", *[_POINTER] * 2, *[_INTEGER] * 2)
        self._rotate_and_store = function("rotate_and_store", *[_POINTER] * 7, _FLOAT, *[_POINTER] * 3, *[_INTEGER] * 4)

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        out = torch.empty_like(x)
        rows, size = x.shape
        self._rms_norm(x.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, size, epsilon)
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        out = torch.empty_like(x)
        rows, size = x.shape
        self._add_rms_norm(x.data_ptr(), residual.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, size, epsilon)
        return out

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
        query = torch.empty(len(qkv), heads.query, heads.dim, dtype=qkv.dtype)
        if batch.num_tokens < len(query):
            query[batch.num_tokens :] = 0
        self._rotate_and_store(
            qkv.data_ptr(),
            batch.positions.data_ptr(),
            batch.slots.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            None if heads.query_norm is None else heads.query_norm.data_ptr(),
            None if heads.key_norm is None else heads.key_norm.data_ptr(),
            epsilon,
            query.data_ptr(),
            pool.keys[layer].data_ptr(),
            pool.values[layer].data_ptr(),
            batch.num_tokens,
            heads.query,
            heads.kv,
            heads.dim,
        )
        return query

    def silu_and_multiply(self, gate_up: Tensor) -> Tensor:
        rows, double = gate_up.shape
        out = torch.empty(rows, double // 2, dtype=gate_up.dtype)
        self._silu_and_multiply(gate_up.data_ptr(), out.data_ptr(), rows, double // 2)
        return out
