"""The one order of a row's tokens, higher logit first and lower id first among equals, and its first few.

Every tie is decided here: greedy, top-k, top-p and the alternatives of logprobs all use this order. The first
few are found without sorting the row: maxima of blocks say which blocks can hold them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 32
_MAX_ID = 2**31 - 1


@dataclass(slots=True)
class Leaders:
    """The first tokens of each row, in order. Those with `certain` False are as good as any others left out:
    they tie with the last one, and a tied token with a lower id may be missing. `complete`: the whole row."""

    logits: Tensor  # float32 [rows, count]
    ids: Tensor  # int64 [rows, count]
    certain: Tensor  # bool [rows, count], a prefix of each row
    complete: bool


def block_maxima(logits: Tensor) -> Tensor:
    """The maxima of every BLOCK consecutive logits, [rows, blocks]. A NaN makes its block's maximum NaN."""
    vocab_size = logits.shape[1]
    whole = vocab_size // BLOCK
    maxima = logits[:, : whole * BLOCK].unflatten(1, (whole, BLOCK)).amax(dim=2)
    if whole * BLOCK == vocab_size:
        return maxima
    return torch.cat([maxima, logits[:, whole * BLOCK :].amax(dim=1, keepdim=True)], dim=1)


def first_tokens(logits: Tensor, maxima: Tensor, rows: Tensor) -> Tensor:
    """The id of the first token of each of `rows` (int64 [n]): the highest logit, the lowest id of equals."""
    ids = _ids_of_blocks(maxima[rows].argmax(dim=1, keepdim=True))
    # Past the vocabulary's end the last logit is read again: argmax takes the first of equals, which is real.
    in_block = logits[rows.unsqueeze(1), ids.clamp(max=logits.shape[1] - 1)].argmax(dim=1, keepdim=True)
    return ids.gather(1, in_block).squeeze(1)


def leaders(logits: Tensor, maxima: Tensor, rows: Tensor, count: int) -> Leaders:
    """The first `count` tokens of each of `rows` of the batch `logits` [all rows, vocab].

    The highest `count` logits are in the `count` blocks with the highest maxima: were one outside, those
    blocks alone would hold `count` logits that are at least as high.
    """
    vocab_size = logits.shape[1]
    complete = count >= vocab_size
    if count >= maxima.shape[1]:
        ids = torch.arange(vocab_size, device=logits.device).expand(len(rows), -1)
        pool = sort_keys(logits[rows], ids)
    else:
        ids = _ids_of_blocks(maxima[rows].topk(count, dim=1, sorted=False).indices)
        pool = sort_keys(logits[rows.unsqueeze(1), ids.clamp(max=vocab_size - 1)], ids)
        if vocab_size % BLOCK:
            pool.masked_fill_(ids >= vocab_size, torch.iinfo(torch.int64).min)
    first, first_ids = split_keys(pool.topk(min(count, vocab_size), dim=1).values)
    certain = torch.ones_like(first, dtype=torch.bool) if complete else first > first[:, -1:]
    return Leaders(first, first_ids, certain, complete)


def exact_leaders(logits: Tensor, maxima: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The first `count` tokens of every row, ties decided: float32 logits and int64 ids, [rows, count]."""
    rows = torch.arange(logits.shape[0], device=logits.device)
    # A few more than asked for, so that a tie at the last one is seldom left open.
    found = leaders(logits, maxima, rows, 2 * count + BLOCK)
    first, ids = found.logits[:, :count].clone(), found.ids[:, :count].clone()
    if not found.complete:
        for row in (~found.certain[:, count - 1]).nonzero().flatten().tolist():
            all_ids = torch.arange(logits.shape[1], device=logits.device)
            first[row], ids[row] = split_keys(sort_keys(logits[row], all_ids).topk(count).values)
    return first, ids


def sort_keys(logits: Tensor, ids: Tensor) -> Tensor:
    """int64 keys, all different, that sort descending in the order of this module. Ids are under 2^31."""
    bits = (logits + 0.0).view(torch.int32)  # -0.0 becomes 0.0, its equal
    ascending = bits ^ ((bits >> 31) & _MAX_ID)
    return (ascending.long() << 32) + (_MAX_ID - ids)


def split_keys(keys: Tensor) -> tuple[Tensor, Tensor]:
    """The logits and the ids that sort_keys joined."""
    ascending = (keys >> 32).int()
    logits = (ascending ^ ((ascending >> 31) & _MAX_ID)).view(torch.float32)
    return logits, _MAX_ID - (keys & 0xFFFFFFFF)


def _ids_of_blocks(blocks: Tensor) -> Tensor:
    offsets = torch.arange(BLOCK, device=blocks.device)
    return (blocks.unsqueeze(2) * BLOCK + offsets).flatten(1)
