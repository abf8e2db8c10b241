"""Draws in PyTorch, for every device, and as what the C kernels are held to.

Rows fall into three kinds, by what has to be computed for them: greedy, truncated (min_p, top_k or top_p) and
plain (temperature alone). Its parts: `ordering`, `weights`, `truncation`, `race`, `logprobs`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from services.engine.sampling.draw import MIN_TEMPERATURE, Drawn, is_greedy, is_truncated
from services.engine.sampling.logprobs import token_logprobs
from services.engine.sampling.ordering import block_maxima, first_tokens
from services.engine.sampling.race import race, row_keys
from services.engine.sampling.row_state import RowState
from services.engine.sampling.truncation import TruncatedRows, sample_truncated, survivors
from services.engine.sampling.weights import Weigher
from shared.protocol import TokenLogprobs


class TorchDrawer:
    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._weigher = Weigher(vocab_size, device)
        self._vocab_size = vocab_size
        self._device = device

    def lay_out(self, states: Sequence[RowState]) -> "TorchBatchDraw":
        return TorchBatchDraw(states, self._vocab_size, self._weigher, self._device)

    def token_logprobs(
        self, logits: Tensor, rows: Sequence[int], token_ids: Sequence[int], counts: Sequence[int]
    ) -> list[TokenLogprobs]:
        if list(rows) != list(range(len(logits))):
            logits = logits[list(rows)]
        return token_logprobs(logits, token_ids, counts, self._weigher)


@dataclass(slots=True)
class _RandomRows:
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


class TorchBatchDraw:
    def __init__(self, states: Sequence[RowState], vocab_size: int, weigher: Weigher, device: torch.device) -> None:
        self._num_rows = len(states)
        self._vocab_size = vocab_size
        self._weigher = weigher
        self._device = device
        good = [(row, state) for row, state in enumerate(states) if state.error is None]
        greedy = [row for row, state in good if is_greedy(state.params)]
        random = [(row, state) for row, state in good if not is_greedy(state.params)]
        self._greedy = torch.tensor(greedy, dtype=torch.int64, device=device)
        self._plain = _random_rows([r for r in random if not is_truncated(r[1].params, vocab_size)], device)
        self._truncated = _random_rows([r for r in random if is_truncated(r[1].params, vocab_size)], device)
        # Limited before it is a tensor: a client's number may be over what int64 holds.
        self._top_k = _column(
            [min(state.params.top_k or vocab_size, vocab_size) for state in self._truncated.states], torch.int64, device
        )
        self._top_p = _column([state.params.top_p for state in self._truncated.states], torch.float64, device)
        min_p = _column([state.params.min_p for state in self._truncated.states], torch.float64, device)
        self._min_weight = (min_p * weigher.scale).clamp(min=1.0)

    def draw(self, logits: Tensor, processed_rows: Sequence[int]) -> Drawn:
        maxima = block_maxima(logits)
        row_max = maxima.amax(dim=1, keepdim=True)
        drawn = torch.zeros(self._num_rows, dtype=torch.int64, device=self._device)
        truncated = None
        if len(self._greedy):
            drawn[self._greedy] = first_tokens(logits, maxima, self._greedy)
        if self._truncated.states:
            truncated = self._truncated_rows(row_max)
            drawn[truncated.row] = sample_truncated(logits, maxima, truncated, self._weigher)
        if self._plain.states:
            drawn[self._plain.row] = self._race_in_two_heats(logits, row_max)
        # One copy to the host; float64 holds every id exactly.
        token_ids, row_maxima = torch.stack([drawn.double(), row_max.squeeze(1).double()]).tolist()
        processed = self._processed(logits, processed_rows, row_maxima, truncated) if processed_rows else None
        return Drawn([int(token_id) for token_id in token_ids], row_maxima, processed)

    def _truncated_rows(self, row_max: Tensor) -> TruncatedRows:
        rows = self._truncated
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

    def _race_in_two_heats(self, logits: Tensor, row_max: Tensor) -> Tensor:
        """The ids that the rows draw which nothing truncates, int64 [n]: see `sampler`."""
        rows, weigher = self._plain, self._weigher
        keys, row_max, temperature = rows.keys(), row_max[rows.row], rows.temperature
        groups = weigher.weigh_groups(logits, rows.row_list, row_max, temperature)
        group = race(groups, keys, torch.arange(-1, -1 - groups.shape[1], -1, device=self._device))
        ids = group * weigher.group + torch.arange(weigher.group, device=self._device)
        inside = ids < self._vocab_size
        members = logits[rows.row.unsqueeze(1), ids.clamp(max=self._vocab_size - 1)]
        weights = weigher.weigh(members, row_max, temperature) * inside
        return ids.gather(1, race(weights, keys, ids)).squeeze(1)

    def _processed(
        self, logits: Tensor, wanted: Sequence[int], row_maxima: Sequence[float], truncated: TruncatedRows | None
    ) -> Tensor:
        """Truncated rows go one after another: logprobs of this kind are seldom asked for."""
        result = logits[list(wanted)]
        place = {row: index for index, row in enumerate(wanted) if math.isfinite(row_maxima[row])}
        for index, row in enumerate(self._plain.row_list):
            if row in place:
                values = result[place[row]]
                values.sub_(values.max()).div_(self._plain.temperature[index])
        for index, row in enumerate(self._truncated.row_list):
            if row in place and truncated is not None:
                parameters = truncated.take(torch.tensor([index], device=logits.device))
                values = result[place[row]]
                kept, _ = survivors(values, parameters, self._weigher)
                tempered = values.sub(values.max()).div_(parameters.temperature[0])[kept]
                values.fill_(-torch.inf)[kept] = tempered
        return result


def _random_rows(rows: Sequence[tuple[int, RowState]], device: torch.device) -> _RandomRows:
    row_list = [row for row, _ in rows]
    states = [state for _, state in rows]
    return _RandomRows(
        states=states,
        row=torch.tensor(row_list, dtype=torch.int64, device=device),
        row_list=row_list,
        seed=torch.tensor([state.params.seed for state in states], dtype=torch.int64, device=device),
        temperature=_column(
            [max(state.params.temperature, MIN_TEMPERATURE) for state in states], torch.float32, device
        ),
    )


def _column(values: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=dtype, device=device).unsqueeze(1)
