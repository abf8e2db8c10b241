"""One stretch of memory for all the packed matrices of a model on a CPU, in the order in which a step reads them.

In huge pages where the system has them: with pages of 4 KiB a processor spends a good part of a step on looking up
where they are.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.engine.model.kernel_structures import LinearArguments
from services.engine.model.kernels import Kernels
from services.engine.model.page_memory import fresh_pages
from services.engine.model.quantization import WeightFormat

_ALIGNMENT = 64  # bytes: a cache line


@dataclass(frozen=True, slots=True)
class MatrixPlan:
    """A matrix [outputs, inputs] that will be packed. `gated`: the first half of its outputs are gates, the second
    what they are for."""

    outputs: int
    inputs: int
    gated: bool = False
    format: WeightFormat = WeightFormat.BF16


class PackedWeights:
    """Room for the matrices of these plans, which `add` then fills in that order."""

    def __init__(self, kernels: Kernels, plans: Sequence[MatrixPlan]) -> None:
        self._size_of = kernels.long.packed_size
        self._panels_of = kernels.long.packed_panels
        self._pack = kernels.long.pack_linear
        self._size_of.argtypes, self._size_of.restype = [ctypes.c_int64] * 4, ctypes.c_int64
        self._panels_of.argtypes, self._panels_of.restype = [ctypes.c_int64] * 2, ctypes.c_int64
        self._pack.argtypes, self._pack.restype = [*[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 5], None
        self._plans = list(reversed(plans))
        self.num_bytes = sum(self._bytes_of(plan) for plan in plans)
        self._memory = fresh_pages(self.num_bytes)
        self._next = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    def add(self, weight: Tensor) -> LinearArguments:
        """Pack the next matrix, bf16 [outputs, inputs]. What is returned has no bias yet."""
        plan = self._plans[-1] if self._plans else None
        if plan is None or tuple(weight.shape) != (plan.outputs, plan.inputs) or weight.dtype != torch.bfloat16:
            raise ValueError(f"a {weight.dtype} matrix {tuple(weight.shape)} was not the one announced: {plan}")
        self._plans.pop()
        address = self._next
        self._next += self._bytes_of(plan)
        weight = weight.contiguous()
        shape = (plan.outputs, plan.inputs, plan.gated, plan.format)
        self._pack(weight.data_ptr(), address, *shape, torch.get_num_threads())
        panels = self._panels_of(plan.outputs, plan.gated)
        return LinearArguments(address, None, plan.inputs, plan.outputs, panels, plan.format)

    def _bytes_of(self, plan: MatrixPlan) -> int:
        size = self._size_of(plan.outputs, plan.inputs, plan.gated, plan.format)
        return -(-size // _ALIGNMENT) * _ALIGNMENT
