"""Grammars' masks for tests: packed as the engine packs them (services/engine/sampling/token_mask.py)."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def pack(allowed: NDArray[np.bool_]) -> Tensor:
    """bool [rows, vocab] -> int32 [rows, ceil(vocab / 32)], whose bits beyond the vocabulary are set in every other
    row."""
    rows, vocab = allowed.shape
    padded = np.zeros((rows, -(-vocab // 32) * 32), dtype=bool)
    padded[::2] = True
    padded[:, :vocab] = allowed
    return torch.from_numpy(np.packbits(padded, axis=1, bitorder="little").view(np.int32))
