"""Bans what grammars' packed masks ban: the layout of xgrammar and of vLLM. `sampler` applies it first of all.

Banned tokens get minus infinity *added*, so that NaN stays NaN and a broken row is noticed even under a mask.
"""

import ctypes

import torch
from torch import Tensor

from services.engine.model.kernels import Kernels

_BITS = 32
_ROWS_AT_ONCE = 16


class TokenMask:
    """By the C kernel (kernels/token_mask.c), or in PyTorch where there is none: on GPUs, or without a compiler."""

    def __init__(self, device: torch.device, kernels: Kernels | None, threads: int) -> None:
        self._kernel = self._additions = None
        if kernels is None:
            self._additions = _byte_additions().to(device)
        else:
            self._kernel = kernels.long.add_token_mask
            self._kernel.argtypes, self._kernel.restype = [*[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 4], None
        self._threads = threads

    def apply(self, logits: Tensor, bitmask: Tensor) -> None:
        """Ban in place what the mask bans: int32 [rows, ceil(vocab / 32)]; bit id % 32 of word id // 32 is set where
        the token is allowed. Rows of -1 alone are left as they are. `logits` are contiguous float32 [rows, vocab].

        Raises ValueError for a mask of another shape or type.
        """
        rows, vocab_size = logits.shape
        if bitmask.dtype != torch.int32 or bitmask.shape != (rows, -(-vocab_size // _BITS)):
            raise ValueError(
                f"a token bitmask for logits {tuple(logits.shape)} must be int32 {(rows, -(-vocab_size // _BITS))}, "
                f"not {bitmask.dtype} {tuple(bitmask.shape)}"
            )
        if self._kernel is not None:
            bitmask = bitmask.contiguous()
            self._kernel(logits.data_ptr(), bitmask.data_ptr(), rows, vocab_size, bitmask.shape[1], self._threads)
        elif self._additions is not None:
            _add_by_bytes(logits, bitmask, self._additions)


def _add_by_bytes(logits: Tensor, bitmask: Tensor, additions: Tensor) -> None:
    masked = (bitmask != -1).any(dim=1).nonzero().squeeze(1)
    for chunk in masked.split(_ROWS_AT_ONCE):
        # A byte's eight additions are looked up: several times faster than taking its bits apart.
        bytes_of_mask = bitmask[chunk].view(torch.uint8).int()
        addition = torch.nn.functional.embedding(bytes_of_mask, additions).flatten(1)[:, : logits.shape[1]]
        if len(masked) == len(logits):
            logits[int(chunk[0]) : int(chunk[-1]) + 1] += addition
        else:
            logits.index_add_(0, chunk, addition)


def _byte_additions() -> Tensor:
    """float32 [256, 8]: for each byte of a mask, 0 where its bit is set and minus infinity where it is not."""
    bits = (torch.arange(256).unsqueeze(1) >> torch.arange(8)) & 1
    return torch.zeros(256, 8).masked_fill_(bits == 0, -torch.inf)
