"""What to do with each row of a batch, laid out once and used for as long as the same requests are in the batch."""

import operator
from collections.abc import Sequence

import torch

from services.engine.sampling.draw import Drawer
from services.engine.sampling.logit_edits import LogitEdits
from services.engine.sampling.row_state import RowState


class BatchPlan:
    """`sampler` follows it: the logits' edits, then the draw, then the logprobs of the rows that ask for them."""

    def __init__(self, states: Sequence[RowState], drawer: Drawer, device: torch.device) -> None:
        self.states = list(states)
        self.edits = LogitEdits(states, device)
        self.draw = drawer.lay_out(states)
        self.logprob_rows = [
            row for row, state in enumerate(states) if state.error is None and state.params.logprobs is not None
        ]

    def is_of(self, states: Sequence[RowState]) -> bool:
        return len(states) == len(self.states) and all(map(operator.is_, states, self.states))
