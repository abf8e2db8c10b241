"""One step as flat tensors: the tokens of all scheduled requests one after another, and where their KV lies.

The executor builds one for each step; the model and its attention read it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from services.engine.request import ScheduledRequest

# oneDNN computes a single row with other kernels than several, which round differently in the last bit. With a row
# of padding beside it, a request's logits are the same alone as in company (tests/unit/engine/model holds it).
MIN_ROWS = 2


@dataclass(slots=True)
class Batch:
    """Rows are tokens; where there is only one, a second row of padding follows it (it has no slot).

    Sequences are the scheduled requests: sequence i owns rows query_starts[i] to query_starts[i + 1], its KV cache
    holds context_lens[i] tokens once those rows are stored, in the blocks of block_tables[i].
    """

    num_tokens: int  # without padding
    num_decodes: int  # leading sequences of one row
    token_ids: Tensor  # int64 [rows]
    positions: Tensor  # int64 [rows]
    slots: Tensor  # int64 [num_tokens]: block * block_size + offset
    query_starts: Tensor  # int32 [sequences + 1]
    context_lens: Tensor  # int32 [sequences]
    block_tables: Tensor  # int32 [sequences, most blocks of a sequence]
    query_lens_list: list[int]
    context_lens_list: list[int]
    token_id_range: tuple[int, int]  # the least and the greatest


def build_batch(
    scheduled: Sequence[ScheduledRequest], *, block_size: int, num_blocks: int, device: torch.device
) -> Batch:
    """Lay the scheduled tokens out. Raises RuntimeError where a block that they reach is missing from its request's
    block table or is none of the pool's: writing there would spoil another request's cache, or the process."""
    token_ids: list[int] = []
    query_lens: list[int] = []
    context_lens: list[int] = []
    num_decodes = 0
    for i, share in enumerate(scheduled):
        end = share.start + share.num_tokens
        if share.num_tokens == 1:
            token_ids.append(share.request.token_ids[share.start])
            num_decodes += num_decodes == i
        else:
            token_ids += share.request.token_ids[share.start : end]
        query_lens.append(share.num_tokens)
        context_lens.append(end)

    num_tokens = len(token_ids)
    blocks = [-(-length // block_size) for length in context_lens]
    block_tables = np.zeros((len(scheduled), max(blocks)), dtype=np.int32)
    for i, share in enumerate(scheduled):
        table = share.request.block_table
        if len(table) < blocks[i]:
            raise RuntimeError(
                f"{share.request.key} is scheduled up to token {context_lens[i]}, but has only {len(table)} KV blocks."
            )
        block_tables[i, : blocks[i]] = table[: blocks[i]]
    if block_tables.min() < 0 or block_tables.max() >= num_blocks:
        raise RuntimeError(f"A block table names a KV block outside the pool's {num_blocks}.")

    lengths = np.array(query_lens, dtype=np.int64)
    query_starts = np.zeros(len(scheduled) + 1, dtype=np.int32)
    np.cumsum(lengths, out=query_starts[1:])
    sequence = np.repeat(np.arange(len(scheduled)), lengths)
    first_positions = np.array(context_lens, dtype=np.int64) - lengths
    positions = np.zeros(max(num_tokens, MIN_ROWS), dtype=np.int64)
    positions[:num_tokens] = np.arange(num_tokens) - query_starts[sequence] + first_positions[sequence]
    real = positions[:num_tokens]
    slots = block_tables[sequence, real // block_size].astype(np.int64) * block_size + real % block_size
    token_id_range = (min(token_ids), max(token_ids))
    token_ids += [0] * (len(positions) - num_tokens)

    def on_device(array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    return Batch(
        num_tokens=num_tokens,
        num_decodes=num_decodes,
        token_ids=on_device(np.array(token_ids, dtype=np.int64)),
        positions=on_device(positions),
        slots=on_device(slots),
        query_starts=on_device(query_starts),
        context_lens=on_device(np.array(context_lens, dtype=np.int32)),
        block_tables=on_device(block_tables),
        query_lens_list=query_lens,
        context_lens_list=context_lens,
        token_id_range=token_id_range,
    )
