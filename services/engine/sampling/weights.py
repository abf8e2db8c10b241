"""Probabilities as whole numbers, so that sums of them are exact and come out equal in every order.

A token's weight is exp((logit - row's maximum) / temperature) in float32, times 2^bits, rounded to a whole
number and kept as float64. All weights of a row add up to at most 2^53: every sum of them is exact, whatever
the order, the batch, the threads or the device that made it, and a nucleus never depends on any of these.
What is lost are tokens over 2^36 times less likely than the likeliest (at a vocabulary of 151,936).

On a CPU the exponential is one of our own, here and in kernels/token_weights.h: the same bits from PyTorch and
from C, on every processor. An accelerator takes PyTorch's, which may differ from it in the last bits, as its
logits do from a CPU's.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

# A row without truncation races in two heats (see `sampler`): groups of so many consecutive ids, then the
# tokens of one. The drawn tokens depend on it: it must be one and the same in the whole fleet.
GROUP = 512
_GPU_ROWS = 64


# Float32's own numbers. Adding _ROUNDER, 1.5 * 2^23, rounds to a whole number.
_LOG2_E, _ROUNDER = float.fromhex("0x1.715476p+0"), 12582912.0
# 2^f for f from -0.5 to 0.5: the highest power's coefficient first, and 1 behind the last.
_POWERS_OF_2 = [
    float.fromhex(coefficient)
    for coefficient in ("0x1.5bba14p-10", "0x1.3cea88p-7", "0x1.c6b752p-5", "0x1.ebf9bcp-3", "0x1.62e42ap-1")
]

# Weights under a half round to 0 below this many nats, so the last bin of all holds none that can be drawn.
BINS = 4096


def scale_of(vocab_size: int) -> float:
    """The weight of a row's likeliest token."""
    return 2.0 ** (53 - math.ceil(math.log2(max(vocab_size, 2))))


class Weigher:
    """Makes weights for one vocabulary, in memory that it keeps: fresh pages cost more than the arithmetic."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.scale = scale_of(vocab_size)
        self._bins_per_nat = BINS / math.log(4 * self.scale)
        self._vocab_size = vocab_size
        self.group = GROUP
        self._groups = -(-vocab_size // self.group)
        on_cpu = device.type == "cpu"
        self._exponential = exponential if on_cpu else torch.exp_
        # On a CPU one row at a time stays in the cache and needs no copy; a GPU wants many at once.
        self._rows_at_once = 1 if on_cpu else _GPU_ROWS
        self._scratch = torch.empty(self._rows_at_once, vocab_size, dtype=torch.float32, device=device)
        self._exact = torch.zeros(self._rows_at_once, self._groups * self.group, dtype=torch.float64, device=device)
        self._bins = torch.empty(vocab_size, dtype=torch.int32, device=device)

    def weigh(self, logits: Tensor, row_max: Tensor, temperature: Tensor) -> Tensor:
        """Whole numbers as float64 [rows, n], of float32 logits [rows, n]; the others are float32 [rows, 1]."""
        return self._exponential(logits.sub(row_max).div_(temperature)).mul_(self.scale).round_().double()

    def weigh_row(self, logits: Tensor, row_max: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
        """The weights of one row, float64 [vocab], and each token's bin from 0 to BINS, int32 [vocab]. `logits`
        is [vocab], the others [1]. A token of a lower bin has a higher logit than one of a higher bin, and in
        bin BINS all weights are 0. Both tensors are overwritten by the next call."""
        scratch = torch.sub(row_max, logits, out=self._scratch[0]).div_(temperature)
        # Every step keeps the order of the logits, so the bins do.
        self._bins.copy_(scratch.mul_(self._bins_per_nat).clamp_(max=BINS))
        exact = self._exact[0, : self._vocab_size]
        self._weigh_into(exact, scratch, logits, row_max, temperature)
        return exact, self._bins

    def weigh_groups(self, logits: Tensor, rows: Sequence[int], row_max: Tensor, temperature: Tensor) -> Tensor:
        """The summed weights of every GROUP consecutive ids, float64 [len(rows), groups].

        `logits` is the whole batch [all rows, vocab]; `row_max` and `temperature` [len(rows), 1] are the rows' own.
        """
        result = torch.empty(len(rows), self._groups, dtype=torch.float64, device=logits.device)
        for start in range(0, len(rows), self._rows_at_once):
            part = slice(start, start + self._rows_at_once)
            chunk = logits[rows[start]].unsqueeze(0) if self._rows_at_once == 1 else logits[list(rows[part])]
            n = len(chunk)
            exact = self._exact[:n]
            self._weigh_into(exact[:, : self._vocab_size], self._scratch[:n], chunk, row_max[part], temperature[part])
            torch.sum(exact.view(n, self._groups, self.group), dim=-1, out=result[part])
        return result

    def _weigh_into(self, exact: Tensor, scratch: Tensor, logits: Tensor, row_max: Tensor, temperature: Tensor) -> None:
        torch.sub(logits, row_max, out=scratch)
        exact.copy_(self._exponential(scratch.div_(temperature)).mul_(self.scale).round_())


def exponential(x: Tensor) -> Tensor:
    """e^x in place, of float32 x from minus infinity to 0: within 4e-6 of it, relatively, and within 6e-7 down to
    -10. Exactly 1 at 0; e^-64 below -64. It never falls as x rises.

    Every operation is one of IEEE 754's, rounded for itself: a CPU's bits do not depend on which CPU it is.
    """
    octaves = x.clamp_(min=-64.0).mul_(_LOG2_E)
    shifted = octaves + _ROUNDER
    # The part that is no whole octave, in multiples of 2^-21: with smaller steps the rounding of the polynomial
    # could let the result fall where x rises.
    rest = octaves.sub_(shifted - _ROUNDER).add_(6.0).sub_(6.0)
    power = rest * _POWERS_OF_2[0]
    for coefficient in _POWERS_OF_2[1:]:
        power.add_(coefficient).mul_(rest)
    exponent = shifted.view(torch.int32).bitwise_left_shift_(23)
    power.add_(1.0).view(torch.int32).add_(exponent)
    return x.copy_(power)
