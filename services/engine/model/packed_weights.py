"""One stretch of memory for all the packed matrices of a model on a CPU, in the order in which a step reads them.

In huge pages where the system has them: with pages of 4 KiB a processor spends a good part of a step on looking up
where they are.
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from services.engine.model.kernels import Kernels
from services.engine.model.page_memory import fresh_pages

_ALIGNMENT = 64  # bytes: a cache line


class PackedWeights:
    """Room for bf16 matrices of the given (outputs, inputs, gated), which `add` then fills in that order."""

    def __init__(self, kernels: Kernels, sizes: Sequence[tuple[int, int, bool]]) -> None:
        self._size_of = kernels.long.packed_size
        self._panels_of = kernels.long.packed_panels
        self._pack = kernels.long.pack_linear
        self._size_of.argtypes, self._size_of.restype = [ctypes.c_int64] * 3, ctypes.c_int64
        self._panels_of.argtypes, self._panels_of.restype = [ctypes.c_int64] * 2, ctypes.c_int64
        self._pack.argtypes, self._pack.restype = [*[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 3], None
        self.num_bytes = sum(self._bytes_of(*size) for size in sizes)
        self._memory = fresh_pages(self.num_bytes)
        self._next = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self._end = self._next + self.num_bytes

    def add(self, weight: Tensor, gated: bool) -> tuple[int, int]:
        """The packed matrix's address and number of panels."""
        outputs, inputs = weight.shape
        address = self._next
        self._next += self._bytes_of(outputs, inputs, gated)
        if self._next > self._end or weight.dtype != torch.bfloat16:
            raise ValueError(f"a {weight.dtype} matrix {tuple(weight.shape)} was not among those that were announced")
        weight = weight.contiguous()
        self._pack(weight.data_ptr(), address, outputs, inputs, gated)
        return address, self._panels_of(outputs, gated)

    def _bytes_of(self, outputs: int, inputs: int, gated: bool) -> int:
        return -(-self._size_of(outputs, inputs, gated) * 2 // _ALIGNMENT) * _ALIGNMENT
