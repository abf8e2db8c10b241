"""The interface of what draws the tokens of a batch whose logits are ready, and tells of their logprobs.

`torch_draw` implements it in PyTorch, for every device; `kernel_draw` in C, for CPUs. The two give the same
tokens. `sampler` chooses one of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from services.engine.sampling.row_state import RowState
from shared.protocol import TokenLogprobs
from shared.sampling_params import SamplingParams

# Keeps the quotient of a tiny temperature finite in float32: 0 for the likeliest, a huge negative for others.
MIN_TEMPERATURE = 1e-30


@dataclass(frozen=True, slots=True)
class Drawn:
    """Of every row its token id and its maximum; a row without a finite maximum has any id. `processed` are the
    logits [n, vocab] of the distributions that the rows asked for drew from: tempered, and minus infinity for
    what min_p, top_k and top_p cut off; of greedy rows as they were."""

    token_ids: list[int]
    row_maxima: list[float]
    processed: Tensor | None


class BatchDraw(Protocol):
    """A batch's parameters, laid out once and used for as long as the same requests are in the batch."""

    def draw(self, logits: Tensor, processed_rows: Sequence[int]) -> Drawn:
        """`logits` is float32 [rows, vocab], contiguous, and is left as it was."""
        ...


class Drawer(Protocol):
    def lay_out(self, states: Sequence[RowState]) -> BatchDraw: ...

    def token_logprobs(
        self, logits: Tensor, rows: Sequence[int], token_ids: Sequence[int], counts: Sequence[int]
    ) -> list[TokenLogprobs]:
        """One entry for each of `rows` of float32 `logits` [any, vocab]: `token_ids[i]`, and its `counts[i]`
        alternatives. These rows have finite maxima.

        The logprobs are of softmax(logits). A rank is the number of higher logits, and 1. Alternatives come in
        the order of `ordering`; tokens whose logit is minus infinity are not among them.
        """
        ...


def is_greedy(params: SamplingParams) -> bool:
    return params.temperature == 0.0 or params.top_k == 1


def is_truncated(params: SamplingParams, vocab_size: int) -> bool:
    return params.top_p < 1.0 or params.min_p > 0.0 or 0 < params.top_k < vocab_size
