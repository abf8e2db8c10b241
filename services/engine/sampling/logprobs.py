"""Logprobs, ranks and the likeliest alternatives, for sampled tokens and for prompts."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from services.engine.sampling.batch_plan import BatchPlan
from services.engine.sampling.ordering import block_maxima, exact_leaders
from services.engine.sampling.truncation import TruncatedRows, survivors
from services.engine.sampling.weights import Weigher
from shared.protocol import TokenLogprobs

_ROWS_AT_ONCE = 64


def token_logprobs(
    logits: Tensor, token_ids: Sequence[int], counts: Sequence[int], weigher: Weigher
) -> list[TokenLogprobs]:
    """One entry for each row of float32 `logits` [n, vocab]: `token_ids[i]`, and its `counts[i]` alternatives.

    The logprobs are of softmax(logits). A rank is the number of higher logits, and 1. Alternatives come in the
    order of `ordering`; tokens whose logit is minus infinity are not among them.
    """
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


def processed_logits(
    logits: Tensor, rows: Sequence[int], plan: BatchPlan, truncated: TruncatedRows | None, weigher: Weigher
) -> Tensor:
    """Logits [len(rows), vocab] of the distributions that these rows of the batch drew from: tempered, and minus
    infinity for what min_p, top_k and top_p cut off. Greedy rows come as they are. Every row has a maximum.

    Truncated rows go one after another: logprobs of this kind are seldom asked for.
    """
    result = logits[list(rows)]
    place = {row: index for index, row in enumerate(rows)}
    for index, row in enumerate(plan.plain.row_list):
        if row in place:
            values = result[place[row]]
            values.sub_(values.max()).div_(plan.plain.temperature[index])
    for index, row in enumerate(plan.truncated.row_list):
        if row in place and truncated is not None:
            parameters = truncated.take(torch.tensor([index], device=logits.device))
            values = result[place[row]]
            kept, _ = survivors(values, parameters, weigher)
            tempered = values.sub(values.max()).div_(parameters.temperature[0])[kept]
            values.fill_(-torch.inf)[kept] = tempered
    return result
