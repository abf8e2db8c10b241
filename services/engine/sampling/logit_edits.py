"""What changes a row's logits before anything is drawn: allowed and banned tokens, bias, penalties.

Only rows that ask for something are touched, and of those only the tokens concerned. Masks *add* minus
infinity, so that NaN stays NaN and a broken row is noticed even under a mask. Grammars' masks are in
`token_mask`.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.engine.sampling.row_state import RowState


class LogitEdits:
    """The edits of one batch's rows. What the parameters alone decide is laid out once; what the output so far
    decides is looked up at each step."""

    def __init__(self, states: Sequence[RowState], device: torch.device) -> None:
        self._device = device
        self._by_output: list[tuple[int, RowState]] = []
        self._penalized: list[tuple[int, RowState]] = []
        allowed: list[tuple[int, NDArray[np.int64]]] = []
        added: list[tuple[int, RowState]] = []
        for row, state in enumerate(states):
            if state.error is not None:
                continue
            if state.allowed is not None:
                allowed.append((row, state.allowed))
            if len(state.added_ids):
                added.append((row, state))
            if state.bans_by_output:
                self._by_output.append((row, state))
            if state.has_penalties:
                self._penalized.append((row, state))
        self._allowed_rows = torch.tensor([row for row, _ in allowed], dtype=torch.int64, device=device)
        self._allowed = self._places(allowed) if allowed else None
        self._added = self._places([(row, state.added_ids) for row, state in added]) if added else None
        self._added_values = (
            self._to_device(np.concatenate([state.added_values for _, state in added])) if added else None
        )
        self._factors = torch.tensor(
            [
                [s.params.repetition_penalty, s.params.frequency_penalty, s.params.presence_penalty]
                for _, s in self._penalized
            ],
            dtype=torch.float32,
            device=device,
        ).reshape(-1, 3)

    @property
    def any(self) -> bool:
        return bool(self._allowed or self._added or self._by_output or self._penalized)

    def apply(self, logits: Tensor) -> None:
        """Change the batch's float32 logits [rows, vocab] in place."""
        if self._allowed is not None:
            kept = logits[self._allowed]
            logits[self._allowed_rows] -= torch.inf
            logits.index_put_(self._allowed, kept)
        if self._added is not None and self._added_values is not None:
            logits.index_put_(self._added, self._added_values, accumulate=True)
        if self._by_output:
            bans = [(row, token_id, -np.inf) for row, state in self._by_output for token_id in state.banned_now()]
            if bans:
                rows, ids, values = self._additions(bans)
                logits.index_put_((rows, ids), values, accumulate=True)
        if self._penalized:
            self._apply_penalties(logits)

    def _apply_penalties(self, logits: Tensor) -> None:
        counts = [(row, state.counts) for row, state in self._penalized if state.counts is not None]
        sizes = np.array([len(count.ids) for _, count in counts])
        rows = self._to_device(np.repeat(np.array([row for row, _ in counts]), sizes))
        ids = self._to_device(np.concatenate([count.ids for _, count in counts]))
        output_counts = self._to_device(np.concatenate([count.output_counts for _, count in counts]))
        factors = self._factors[self._to_device(np.repeat(np.arange(len(counts)), sizes))]
        repetition, frequency, presence = factors.unbind(1)
        values = logits[rows, ids]
        values = torch.where(values > 0, values / repetition, values * repetition)
        values -= frequency * output_counts
        values -= presence * (output_counts > 0)
        logits.index_put_((rows, ids), values)

    def _places(self, entries: Sequence[tuple[int, NDArray[np.int64]]]) -> tuple[Tensor, Tensor]:
        """Rows and ids, int64 [n] each, of some rows and the ids concerned in each."""
        rows = np.repeat(np.array([row for row, _ in entries]), [len(ids) for _, ids in entries])
        return self._to_device(rows), self._to_device(np.concatenate([ids for _, ids in entries]))

    def _additions(self, entries: Sequence[tuple[int, int, float]]) -> tuple[Tensor, Tensor, Tensor]:
        rows, ids, values = zip(*entries, strict=True)
        return (
            torch.tensor(rows, dtype=torch.int64, device=self._device),
            torch.tensor(ids, dtype=torch.int64, device=self._device),
            torch.tensor(values, dtype=torch.float32, device=self._device),
        )

    def _to_device(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)
