"""Rows with min_p, top_k or top_p: which tokens survive, and the race among them.

Whatever survives is the front of the row in `ordering`'s order, so a few leaders settle most rows. A row that
they do not settle tries more leaders, and at last looks at all of its tokens; the survivors are the same
whichever of these found them.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from services.engine.sampling.ordering import leaders, sort_keys
from services.engine.sampling.race import race
from services.engine.sampling.weights import BINS, Weigher

# How many leaders are tried, one after the other. They are constants, and change speed alone, never a result.
LEADERS = (64, 256)


@dataclass(slots=True)
class TruncatedRows:
    """Some rows of the batch. `row` is int64 [n], all others are [n, 1]."""

    row: Tensor
    row_max: Tensor  # float32
    temperature: Tensor  # float32
    min_weight: Tensor  # float64: min_p in units of `weights`, and never under 1: weight 0 is never drawn
    top_k: Tensor  # int64, the vocabulary's size where it is off
    top_p: Tensor  # float64
    keys: Tensor  # int64: race.row_keys
    mass: Tensor  # float64: the whole row's weight; infinite where nobody needs it

    def take(self, index: Tensor) -> "TruncatedRows":
        return TruncatedRows(*(getattr(self, name)[index] for name in self.__slots__))


def sample_truncated(logits: Tensor, maxima: Tensor, rows: TruncatedRows, weigher: Weigher) -> Tensor:
    """The drawn token ids, int64 [n]. Rows whose maximum is not finite get any id."""
    vocab_size = logits.shape[1]
    if vocab_size > LEADERS[0]:
        rows = _with_mass(logits, rows, weigher)
    drawn, settled = _race_of_leaders(logits, maxima, rows, LEADERS[0], weigher)
    settled |= ~rows.row_max.isfinite()
    open_rows = (~settled).squeeze(1).nonzero().squeeze(1)
    for count in LEADERS[1:]:
        if len(open_rows) == 0:
            return drawn.squeeze(1)
        drawn[open_rows], settled = _race_of_leaders(logits, maxima, rows.take(open_rows), count, weigher)
        open_rows = open_rows[~settled.squeeze(1)]
    for index in open_rows.unsqueeze(1):
        row = rows.take(index)
        ids, weights = survivors(logits[int(row.row)], row, weigher)
        drawn[index] = ids[race(weights.unsqueeze(0), row.keys, ids.unsqueeze(0))]
    return drawn.squeeze(1)


def _with_mass(logits: Tensor, rows: TruncatedRows, weigher: Weigher) -> TruncatedRows:
    """Add up the rows in which only top_p truncates: its share is one of the whole row's weight."""
    only_top_p = (rows.top_k >= logits.shape[1]) & (rows.min_weight <= 1)
    index = only_top_p.squeeze(1).nonzero().squeeze(1)
    if len(index) == 0:
        return rows
    part = rows.take(index)
    groups = weigher.weigh_groups(logits, part.row.tolist(), part.row_max, part.temperature)
    mass = rows.mass.clone()
    mass[index] = groups.sum(dim=1, keepdim=True)
    return replace(rows, mass=mass)


def _race_of_leaders(
    logits: Tensor, maxima: Tensor, rows: TruncatedRows, count: int, weigher: Weigher
) -> tuple[Tensor, Tensor]:
    """Drawn ids and whether they hold, both [n, 1]: a row is settled if its leaders contain all survivors."""
    first = leaders(logits, maxima, rows.row, count)
    weights = weigher.weigh(first.logits, rows.row_max, rows.temperature)
    certain_count = first.certain.sum(dim=1, keepdim=True)
    rank = torch.arange(weights.shape[1], device=logits.device)
    weights *= first.certain & (rank < rows.top_k) & (weights >= rows.min_weight)
    running = weights.cumsum(dim=1)
    found = running[:, -1:]
    # Nothing that min_p and top_k leave lies beyond the certain leaders: their sum is what top_p is a share of.
    closed = (rows.top_k <= certain_count) | (
        weigher.weigh(first.logits[:, -1:], rows.row_max, rows.temperature) < rows.min_weight
    )
    if first.complete:
        closed = torch.ones_like(closed)
    nucleus = rows.top_p * torch.where(closed, found, rows.mass)
    settled = closed | (found >= nucleus)
    weights *= running - weights < nucleus
    return first.ids.gather(1, race(weights, rows.keys, first.ids)), settled


@dataclass(slots=True)
class _Tokens:
    """Some tokens of one row, [n] each; `ids` is None where they are all of them, ascending otherwise. `bins` are
    a coarse order, int32: a token of a lower bin comes before one of a higher."""

    ids: Tensor | None
    weights: Tensor
    bins: Tensor

    def take(self, index: Tensor) -> "_Tokens":
        return _Tokens(index if self.ids is None else self.ids[index], self.weights[index], self.bins[index])


def survivors(logits: Tensor, row: TruncatedRows, weigher: Weigher) -> tuple[Tensor, Tensor]:
    """All tokens of one row, `logits` [vocab], that are not cut off: ids, int64 [n], and weights, float64 [n].

    The row's maximum must be finite.
    """
    tokens = _Tokens(None, *weigher.weigh_row(logits, row.row_max[0], row.temperature[0]))
    min_weight, top_k, top_p = float(row.min_weight), int(row.top_k), float(row.top_p)
    if min_weight > 1.0:
        tokens = tokens.take((tokens.weights >= min_weight).nonzero().squeeze(1))
    if top_k < len(tokens.bins):
        tokens = _front(logits, tokens, torch.ones_like(tokens.weights), float(top_k))
    if top_p < 1.0:
        tokens = _front(logits, tokens, tokens.weights, top_p * float(tokens.weights.sum()))
    if tokens.ids is None:
        tokens = tokens.take((tokens.weights > 0).nonzero().squeeze(1))
    assert tokens.ids is not None
    return tokens.ids, tokens.weights


def _front(logits: Tensor, tokens: _Tokens, amounts: Tensor, limit: float) -> _Tokens:
    """The shortest front of these tokens whose whole-numbered `amounts` reach `limit`.

    A histogram says in which bin the front ends, and only the tokens of that bin are sorted.
    """
    running = torch.bincount(tokens.bins, weights=amounts, minlength=BINS + 1).cumsum(dim=0)
    last_bin = int(torch.searchsorted(running, limit))
    in_front = tokens.bins <= last_bin
    if last_bin <= BINS:
        in_bin = (tokens.bins == last_bin).nonzero().squeeze(1)
        ids = in_bin if tokens.ids is None else tokens.ids[in_bin]
        in_bin = in_bin[sort_keys(logits[ids], ids).argsort(descending=True)]
        inside = amounts[in_bin]
        before = running[last_bin] - inside.sum() + inside.cumsum(dim=0) - inside
        in_front[in_bin] = before < limit
    return tokens.take(in_front.nonzero().squeeze(1))
