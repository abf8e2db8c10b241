"""A batch's parameters as tensors, laid out once and used for as long as the same requests are in the batch.

Rows fall into three kinds, by what has to be computed for them: greedy, truncated (min_p, top_k or top_p) and
plain (temperature alone). `sampler` runs the three.
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.engine.sampling.logit_edits import LogitEdits
from services.engine.sampling.race import row_keys
from services.engine.sampling.row_state import RowState
from services.engine.sampling.truncation import TruncatedRows
from shared.sampling_params import SamplingParams

# Keeps the quotient of a tiny temperature finite in float32: 0 for the likeliest, a huge negative for others.
_MIN_TEMPERATURE = 1e-30


def is_greedy(params: SamplingParams) -> bool:
    return params.temperature == 0.0 or params.top_k == 1


def is_truncated(params: SamplingParams, vocab_size: int) -> bool:
    return params.top_p < 1.0 or params.min_p > 0.0 or 0 < params.top_k < vocab_size


@dataclass(slots=True)
class RandomRows:
    """The rows of one kind that draw. `row` and `seed` are int64 [n], `temperature` float32 [n, 1]."""

    states: list[RowState]
    row: Tensor
    row_list: list[int]
    seed: Tensor
    temperature: Tensor

    def keys(self) -> Tensor:
        """The hash of each row's seed and of the position of the token that it draws now, int64 [n, 1]."""
        positions = torch.tensor([state.num_tokens for state in self.states], device=self.row.device)
        return row_keys(self.seed, positions)


class BatchPlan:
    """What to do with each row of a batch of these states."""

    def __init__(self, states: list[RowState], vocab_size: int, scale: float, device: torch.device) -> None:
        self.states = states
        self.edits = LogitEdits(states, device)
        good = [(row, state) for row, state in enumerate(states) if state.error is None]
        self.logprob_rows = [row for row, state in good if state.params.logprobs is not None]
        greedy = [row for row, state in good if is_greedy(state.params)]
        random = [(row, state) for row, state in good if not is_greedy(state.params)]
        self.greedy = torch.tensor(greedy, dtype=torch.int64, device=device)
        self.plain = _random_rows([r for r in random if not is_truncated(r[1].params, vocab_size)], device)
        self.truncated = _random_rows([r for r in random if is_truncated(r[1].params, vocab_size)], device)
        # Limited before it is a tensor: a client's number may be over what int64 holds.
        self._top_k = _column(
            [min(state.params.top_k or vocab_size, vocab_size) for state in self.truncated.states], torch.int64, device
        )
        self._top_p = _column([state.params.top_p for state in self.truncated.states], torch.float64, device)
        min_p = _column([state.params.min_p for state in self.truncated.states], torch.float64, device)
        self._min_weight = (min_p * scale).clamp(min=1.0)

    def is_of(self, states: list[RowState]) -> bool:
        return len(states) == len(self.states) and all(map(operator.is_, states, self.states))

    def truncated_rows(self, row_max: Tensor) -> TruncatedRows:
        """The truncated rows of this step; `row_max` is the whole batch's, float32 [rows, 1]."""
        rows = self.truncated
        return TruncatedRows(
            row=rows.row,
            row_max=row_max[rows.row],
            temperature=rows.temperature,
            min_weight=self._min_weight,
            top_k=self._top_k,
            top_p=self._top_p,
            keys=rows.keys(),
            mass=torch.full_like(self._top_p, torch.inf),
        )


def _random_rows(rows: Sequence[tuple[int, RowState]], device: torch.device) -> RandomRows:
    row_list = [row for row, _ in rows]
    states = [state for _, state in rows]
    return RandomRows(
        states=states,
        row=torch.tensor(row_list, dtype=torch.int64, device=device),
        row_list=row_list,
        seed=torch.tensor([state.params.seed for state in states], dtype=torch.int64, device=device),
        temperature=_column(
            [max(state.params.temperature, _MIN_TEMPERATURE) for state in states], torch.float32, device
        ),
    )


def _column(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device).unsqueeze(1)
