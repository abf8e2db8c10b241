"""Logprobs, ranks and the likeliest alternatives, for sampled tokens and for prompts, in PyTorch.

kernels/token_logprobs.c has the same in C.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from services.engine.sampling.ordering import block_maxima, exact_leaders
from services.engine.sampling.weights import Weigher
from shared.protocol import TokenLogprobs

_ROWS_AT_ONCE = 64


def token_logprobs(
    logits: Tensor, token_ids: Sequence[int], counts: Sequence[int], weigher: Weigher
) -> list[TokenLogprobs]:
    """One entry for each row of float32 `logits` [n, vocab]: see `draw.Drawer.token_logprobs`."""
    entries: list[TokenLogprobs] = []
    for start in range(0, len(token_ids), _ROWS_AT_ONCE):
        part = slice(start, start + _ROWS_AT_ONCE)
        entries += _some_token_logprobs(logits[part], token_ids[part], counts[part], weigher)
    return entries


def _some_token_logprobs(
    logits: Tensor, token_ids: Sequence[int], counts: Sequence[int], weigher: Weigher
) -> list[TokenLogprobs]:
    maxima = block_maxima(logits)
    row_max = maxima.amax(dim=1, keepdim=True)
    total = weigher.weigh_groups(logits, range(len(token_ids)), row_max, torch.ones_like(row_max)).sum(1, keepdim=True)
    log_total = row_max.double() + (total / weigher.scale).log()
    chosen = logits.gather(1, torch.tensor(token_ids, device=logits.device).unsqueeze(1))
    ranks = (logits > chosen).sum(dim=1).tolist()
    logprobs = (chosen.double() - log_total).squeeze(1).tolist()
    top_ids: list[list[int]] = [[]] * len(token_ids)
    top_logprobs: list[list[float]] = [[]] * len(token_ids)
    most = min(max(counts), logits.shape[1])
    if most > 0:
        top, ids = exact_leaders(logits, maxima, most)
        top_ids, top_logprobs = ids.tolist(), (top.double() - log_total).tolist()
    entries: list[TokenLogprobs] = []
    for row, count in enumerate(counts):
        alternatives = sum(logprob != -math.inf for logprob in top_logprobs[row][:count])
        entries.append(
            TokenLogprobs(
                token_id=token_ids[row],
                logprob=logprobs[row],
                rank=ranks[row] + 1,
                top_token_ids=top_ids[row][:alternatives],
                top_logprobs=top_logprobs[row][:alternatives],
            )
        )
    return entries
