"""Matrix products with weights that never change: packed once, for CPUs, into the layout that oneDNN wants.

PyTorch's own `linear` packs bf16 weights anew at every call; packed once, a decode step takes less than half of the
time, and large prefills take no longer. So only the packed copy is kept.
"""

from functools import cache
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional


class Linear(Protocol):
    """x [rows, in] (contiguous) -> [rows, out]."""

    def __call__(self, x: Tensor) -> Tensor: ...


class PlainLinear:
    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self._weight, self._bias)


class PackedLinear:
    """A row's result depends neither on the other rows nor on how many they are, as long as there are two: see
    batch.MIN_ROWS."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        # Packed for a typical decode batch; what is packed for another size runs as fast at any size.
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), 32)
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")


class PackedLinearModule(nn.Module):
    """PackedLinear in the place of an nn.Linear, for transformers' own modules."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self._linear = PackedLinear(linear.weight.data, None if linear.bias is None else linear.bias.data)
        self.in_features, self.out_features = linear.in_features, linear.out_features

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features).contiguous()
        return self._linear(rows).view(*x.shape[:-1], self.out_features)


@cache
def can_pack(device_type: str, dtype: torch.dtype) -> bool:
    """Whether this processor's oneDNN packs weights of this type (float16 needs rare instructions)."""
    if device_type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    try:
        packed = PackedLinear(torch.ones(16, 16, dtype=dtype), torch.zeros(16, dtype=dtype))
        return bool((packed(torch.ones(2, 16, dtype=dtype)) == 16).all())
    except (RuntimeError, AttributeError):
        return False


def make_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """weight [out, in]; packed where that is possible (the weight itself may then be let go)."""
    if can_pack(weight.device.type, weight.dtype):
        return PackedLinear(weight, bias)
    return PlainLinear(weight, bias)


def pack_linear_modules(module: nn.Module) -> None:
    """Replace every plain nn.Linear inside `module` by its packed form, one by one, to hold no two copies."""
    for name, child in module.named_children():
        if type(child) is nn.Linear and can_pack(child.weight.device.type, child.weight.dtype):
            setattr(module, name, PackedLinearModule(child))
        else:
            pack_linear_modules(child)
