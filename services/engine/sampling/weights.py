"""Probabilities as whole numbers, so that sums of them are exact and come out equal in every order.

A token's weight is exp((logit - row's maximum) / temperature) in float32, times 2^bits, rounded to a whole
number and kept as float64. All weights of a row add up to at most 2^53: every sum of them is exact, whatever
the order, the batch, the threads or the device that made it, and a nucleus never depends on any of these.
What is lost are tokens over 2^36 times less likely than the likeliest (at a vocabulary of 151,936).
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

# A row without truncation races in two heats (see `sampler`): groups of so many consecutive ids, then the
# tokens of one. The drawn tokens depend on it: it must be one and the same in the whole fleet.
GROUP = 512
_GPU_ROWS = 64


# Weights under a half round to 0 below this many nats, so the last bin of all holds none that can be drawn.
BINS = 4096


class Weigher:
    """Makes weights for one vocabulary, in memory that it keeps: fresh pages cost more than the arithmetic."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.scale = 2.0 ** (53 - math.ceil(math.log2(max(vocab_size, 2))))
        self._bins_per_nat = BINS / math.log(4 * self.scale)
        self._vocab_size = vocab_size
        self.group = GROUP
        self._groups = -(-vocab_size // self.group)
        # On a CPU one row at a time stays in the cache and needs no copy; a GPU wants many at once.
        self._rows_at_once = 1 if device.type == "cpu" else _GPU_ROWS
        self._scratch = torch.empty(self._rows_at_once, vocab_size, dtype=torch.float32, device=device)
        self._exact = torch.zeros(self._rows_at_once, self._groups * self.group, dtype=torch.float64, device=device)
        self._bins = torch.empty(vocab_size, dtype=torch.int32, device=device)

    def weigh(self, logits: Tensor, row_max: Tensor, temperature: Tensor) -> Tensor:
        """Whole numbers as float64 [rows, n], of float32 logits [rows, n]; the others are float32 [rows, 1]."""
        return logits.sub(row_max).div_(temperature).exp_().mul_(self.scale).round_().double()

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
        exact.copy_(scratch.div_(temperature).exp_().mul_(self.scale).round_())
