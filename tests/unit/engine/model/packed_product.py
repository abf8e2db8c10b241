"""One product with a packed matrix, called as the decoder calls it."""

import ctypes

import torch
from torch import Tensor

from services.engine.model.kernel_structures import LinearArguments
from services.engine.model.kernels import Kernels
from services.engine.model.packed_weights import MatrixPlan, PackedWeights
from services.engine.model.quantization import WeightFormat


class PackedMatrix:
    """weight [outputs, inputs] and bias [outputs], in bf16."""

    def __init__(
        self, kernels: Kernels, weight: Tensor, bias: Tensor | None = None, format_: WeightFormat = WeightFormat.BF16
    ) -> None:
        outputs, self.inputs = weight.shape
        self._packed = PackedWeights(kernels, [MatrixPlan(outputs, self.inputs, format=format_)])
        self._bias = bias
        self._linear = self._packed.add(weight)
        self._linear.bias = None if bias is None else bias.data_ptr()
        self._run = kernels.long.linear_float
        self._run.argtypes = [ctypes.POINTER(LinearArguments), *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 2]
        self._run.restype = None
        self._run_allowed = kernels.long.allowed_linear_float
        self._run_allowed.argtypes = [
            ctypes.POINTER(LinearArguments),
            *[ctypes.c_void_p] * 3,
            *[ctypes.c_int64] * 3,
        ]
        self._run_allowed.restype = None

    @property
    def num_bytes(self) -> int:
        return self._packed.num_bytes

    def times(self, x: Tensor, threads: int = 1) -> Tensor:
        """x [rows, inputs], bf16 -> [rows, outputs], float32"""
        out = torch.full((len(x), self._linear.outputs), torch.nan)
        self._run(self._linear, x.data_ptr(), out.data_ptr(), len(x), threads)
        return out

    def times_where(self, x: Tensor, bitmask: Tensor, threads: int = 1) -> Tensor:
        """`times` of what the mask allows, int32 [rows, ceil(outputs / 32)]; minus infinity elsewhere."""
        out = torch.full((len(x), self._linear.outputs), torch.nan)
        pointers = x.data_ptr(), bitmask.data_ptr(), out.data_ptr()
        self._run_allowed(self._linear, *pointers, *bitmask.shape, threads)
        return out

    def weights(self) -> Tensor:
        """What the matrix really is: [outputs, inputs], float32. Exact: every sum has one term that is not zero."""
        return self.times(torch.eye(self.inputs, dtype=torch.bfloat16)).T
