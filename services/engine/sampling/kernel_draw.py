"""Draws on a CPU by the C kernels (sample_tokens.c and token_logprobs.c in services/engine/model/kernels): every row in
one pass or a few, rows shared among threads, nothing sorted and nothing copied.

The tokens are those of `torch_draw`, whose weights are the same to the bit. The two take their logarithms from
different libraries, so a race that is won by a part in 10^15 might end otherwise.
"""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from services.engine.model.kernels import MAX_TEAM_THREADS, Kernels
from services.engine.sampling import weights
from services.engine.sampling.draw import MIN_TEMPERATURE, Drawn, is_greedy, is_truncated
from services.engine.sampling.row_state import RowState
from shared.protocol import TokenLogprobs
from shared.sampling_params import SamplingParams

# Of how many logits the maximum is kept, and how many tokens are tried first where top_p or min_p truncate. They
# change speed alone, never a result.
BLOCK = 128
FIRST_TRY = 64

_HARMLESS = SamplingParams(temperature=0.0)

NOTHING, GREEDY, PLAIN, TRUNCATED = range(4)  # as in sample_tokens.c

_POINTER, _INTEGER, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class _ScratchPool(ctypes.Structure):
    _fields_ = (("memory", _POINTER), ("taken", _POINTER), ("threads", _INTEGER), ("bytes", _INTEGER))


class _Sampling(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("kinds", "temperatures", "min_weights", "top_ps")),
        *((name, _POINTER) for name in ("top_ks", "seeds", "positions", "logits")),
        *((name, _INTEGER) for name in ("rows", "vocab", "group", "block", "first_try")),
        ("scale", _FLOAT),
        *((name, _POINTER) for name in ("token_ids", "maxima", "processed")),
        ("pool", _ScratchPool),
    )


class _Logprobs(ctypes.Structure):
    _fields_ = (
        ("logits", _POINTER),
        *((name, _INTEGER) for name in ("vocab", "block")),
        *((name, _POINTER) for name in ("rows", "token_ids", "alternatives")),
        *((name, _INTEGER) for name in ("count", "width")),
        ("scale", _FLOAT),
        *((name, _POINTER) for name in ("logprobs", "ranks", "found", "top_ids", "top_logprobs")),
        ("pool", _ScratchPool),
    )


class KernelDrawer:
    """Its methods belong to one thread."""

    def __init__(self, kernels: Kernels, vocab_size: int, threads: int) -> None:
        self.vocab_size, self.scale = vocab_size, weights.scale_of(vocab_size)
        self.group, self.block = weights.GROUP, BLOCK
        self.sample = _function(kernels, "sample_tokens", _Sampling)
        self._token_logprobs = _function(kernels, "token_logprobs", _Logprobs)
        scratch_bytes = kernels.quick.sampling_scratch_bytes
        scratch_bytes.argtypes, scratch_bytes.restype = [ctypes.c_int64] * 2, ctypes.c_int64
        threads = min(threads, MAX_TEAM_THREADS)
        num_bytes = int(scratch_bytes(vocab_size, self.block))
        # Most of it is never touched, and then costs nothing.
        self._memory = torch.empty(threads * num_bytes, dtype=torch.uint8)
        self._taken = np.zeros(threads, dtype=np.int32)
        self.pool = _ScratchPool(self._memory.data_ptr(), self._taken.ctypes.data, threads, num_bytes)

    def lay_out(self, states: Sequence[RowState]) -> "KernelBatchDraw":
        return KernelBatchDraw(self, states)

    def token_logprobs(
        self, logits: Tensor, rows: Sequence[int], token_ids: Sequence[int], counts: Sequence[int]
    ) -> list[TokenLogprobs]:
        logits = logits.contiguous()
        count, width = len(rows), min(max(counts), self.vocab_size)
        asked = np.array([rows, token_ids, [min(n, width) for n in counts]], dtype=np.int64)
        numbers = np.empty((2, count), dtype=np.int64)  # ranks, found
        logprobs = np.empty(count)
        top_ids, top_logprobs = np.empty((count, width), dtype=np.int64), np.empty((count, width))
        self._token_logprobs(
            _Logprobs(
                logits.data_ptr(),
                self.vocab_size,
                self.block,
                *(row.ctypes.data for row in asked),
                count,
                width,
                self.scale,
                logprobs.ctypes.data,
                *(row.ctypes.data for row in numbers),
                top_ids.ctypes.data,
                top_logprobs.ctypes.data,
                self.pool,
            )
        )
        return [
            TokenLogprobs(
                token_id=token_id,
                logprob=logprob,
                rank=rank,
                top_token_ids=ids[:found],
                top_logprobs=values[:found],
            )
            for token_id, logprob, rank, found, ids, values in zip(
                token_ids, logprobs.tolist(), *numbers.tolist(), top_ids.tolist(), top_logprobs.tolist(), strict=True
            )
        ]


class KernelBatchDraw:
    def __init__(self, drawer: KernelDrawer, states: Sequence[RowState]) -> None:
        self._drawer = drawer
        self._states = list(states)
        vocab_size, count = drawer.vocab_size, len(states)
        # The numbers of a row that has an error may be such that no array holds them.
        params = [state.params if state.error is None else _HARMLESS for state in states]
        self._kinds = np.array([_kind(state, vocab_size) for state in states], dtype=np.int64)
        self._temperatures = np.array([max(p.temperature, MIN_TEMPERATURE) for p in params], dtype=np.float32)
        min_ps, self._top_ps = np.array([(p.min_p, p.top_p) for p in params], dtype=np.float64).reshape(-1, 2).T.copy()
        self._min_weights = np.maximum(min_ps * drawer.scale, 1.0)
        self._top_ks = np.array([min(p.top_k or vocab_size, vocab_size) for p in params], dtype=np.int64)
        self._seeds = np.array([p.seed for p in params], dtype=np.int64)
        self._positions = np.zeros(count, dtype=np.int64)
        self._token_ids = np.zeros(count, dtype=np.int64)
        self._maxima = np.zeros(count, dtype=np.float32)
        self._processed = np.zeros(count, dtype=np.int64)
        self._arguments = _Sampling(
            self._kinds.ctypes.data,
            self._temperatures.ctypes.data,
            self._min_weights.ctypes.data,
            self._top_ps.ctypes.data,
            self._top_ks.ctypes.data,
            self._seeds.ctypes.data,
            self._positions.ctypes.data,
            rows=count,
            vocab=vocab_size,
            group=drawer.group,
            block=drawer.block,
            first_try=FIRST_TRY,
            scale=drawer.scale,
            token_ids=self._token_ids.ctypes.data,
            maxima=self._maxima.ctypes.data,
            pool=drawer.pool,
        )

    def draw(self, logits: Tensor, processed_rows: Sequence[int]) -> Drawn:
        self._positions[:] = [state.num_tokens for state in self._states]
        self._arguments.logits = logits.data_ptr()
        processed = None
        # No pointer of an earlier draw may stay: what it points to is gone.
        self._arguments.processed = None
        if processed_rows:
            self._processed[:] = 0
            processed = torch.empty(len(processed_rows), logits.shape[1])
            self._processed[list(processed_rows)] = [row.data_ptr() for row in processed]
            self._arguments.processed = self._processed.ctypes.data
        self._drawer.sample(self._arguments)
        return Drawn(self._token_ids.tolist(), self._maxima.tolist(), processed)


def _kind(state: RowState, vocab_size: int) -> int:
    if state.error is not None:
        return NOTHING
    if is_greedy(state.params):
        return GREEDY
    return TRUNCATED if is_truncated(state.params, vocab_size) else PLAIN


def _function(kernels: Kernels, name: str, arguments: Any) -> Callable[..., None]:
    function = getattr(kernels.long, name)
    function.argtypes, function.restype = [ctypes.POINTER(arguments)], None
    return function
