"""Weights of 8 or 4 bits: which matrices have them, and what they are once rounded.

A group of a row's weights has one scale (bf16): the whole row in int8, GROUP inputs in int4. A weight is stored as the
nearest whole number of scales. The kernels hold them so (kernels/pack_linear.c quantizes, by the same rule);
`rounded_weights` is for where the kernels do not run.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

Quantization = Literal["none", "int8", "int4"]


class WeightFormat(IntEnum):
    """As in kernels/weight_formats.h."""

    BF16 = 0
    INT8 = 1
    INT4 = 2


@dataclass(frozen=True, slots=True)
class Formats:
    """Of the matrices around the attention, of those of the MLP, which are most of the weights, and of the one that
    makes logits."""

    attention: WeightFormat
    mlp: WeightFormat
    head: WeightFormat


FORMATS: dict[Quantization, Formats] = {
    "none": Formats(WeightFormat.BF16, WeightFormat.BF16, WeightFormat.BF16),
    "int8": Formats(WeightFormat.INT8, WeightFormat.INT8, WeightFormat.INT8),
    # Four bits cost most where they save least.
    "int4": Formats(WeightFormat.INT8, WeightFormat.INT4, WeightFormat.INT8),
}
GROUP = 32  # INT4_GROUP in kernels/weight_formats.h
_SCALES_TRIED = 12
_ROWS_AT_ONCE = 128  # so that they stay in the processor's cache


def rounded_weights(weight: Tensor, format_: WeightFormat) -> Tensor:
    """[outputs, inputs] -> what the format makes of it, in the weight's own type."""
    if format_ is WeightFormat.BF16:
        return weight
    return torch.cat([_rounded(rows, format_) for rows in weight.split(_ROWS_AT_ONCE)])


def _rounded(weight: Tensor, format_: WeightFormat) -> Tensor:
    outputs, inputs = weight.shape
    group = GROUP if format_ is WeightFormat.INT4 else inputs
    wide = functional.pad(weight.float(), (0, -inputs % group)).view(outputs, -1, group)
    scale = _best_scales(wide, format_).bfloat16().float()
    inverse = torch.where(scale == 0, 0, 1 / scale)
    return (_whole_numbers(wide * inverse, format_) * scale).view(outputs, -1)[:, :inputs].to(weight.dtype)


def _best_scales(weight: Tensor, format_: WeightFormat) -> Tensor:
    """weight [..., group] -> [..., 1], by the rule in kernels/pack_linear.c."""
    largest = weight.gather(-1, weight.abs().argmax(-1, keepdim=True))
    if format_ is WeightFormat.INT8:
        scale = largest.abs() / 127
    else:
        scale, most_explained = torch.zeros_like(largest), torch.zeros_like(largest)
        for i in range(_SCALES_TRIED):
            codes = _whole_numbers(weight * ((0.85 + 0.05 * i) * -8 / largest), format_)
            product, square = (weight * codes).sum(-1, keepdim=True), codes.square().sum(-1, keepdim=True)
            explained = product.square() / square
            better = explained > most_explained  # not where all weights are zero: NaN is no more than anything
            scale = torch.where(better, product / square, scale)
            most_explained = torch.where(better, explained, most_explained)
    return torch.where(weight.isfinite().all(-1, keepdim=True), scale, torch.nan)


def _whole_numbers(x: Tensor, format_: WeightFormat) -> Tensor:
    low, high = (-8, 7) if format_ is WeightFormat.INT4 else (-127, 127)
    return x.clamp(low, high).round()
