"""Randomness as a pure function of (seed, position, token id), and the exponential race that spends it.

There is no generator state anywhere: a row draws the same token alone, in any batch, after a preemption and
on another engine. `sampler` and `truncation` run the races; `weights` makes the weights that run in them.
"""

from torch import Tensor

# SplitMix64 (Steele, Lea, Flood 2014): its increment, and the multipliers of its finalizer (Stafford's mix 13),
# as signed 64-bit integers. Every input bit reaches every output bit, so a 63-bit seed counts entirely.
_INCREMENT = 0x9E3779B97F4A7C15 - 2**64
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9 - 2**64
_MULTIPLIER_2 = 0x94D049BB133111EB - 2**64


def row_keys(seeds: Tensor, positions: Tensor) -> Tensor:
    """The hash of (seed, position), int64 [rows, 1], of int64 [rows] each."""
    return _mix(_mix(seeds + _INCREMENT) + positions * _INCREMENT).unsqueeze(1)


def exponentials(keys: Tensor, ids: Tensor) -> Tensor:
    """Exponential variates of rate 1, float64 [rows, n]: one for each of `ids` [rows or 1, n], over 0.

    Token ids are 0 and up; negative ids name other entrants (see `race_all`).
    """
    bits = _mix(keys + (ids + 1) * _INCREMENT)
    # 52 bits and a half: never 0 and never 1, so that the logarithm is finite and not 0.
    uniform = _shift_right(bits, 12).double().add_(0.5).mul_(2.0**-52)
    return uniform.log_().neg_()


def race(weights: Tensor, keys: Tensor, ids: Tensor) -> Tensor:
    """The position along the last axis, int64 [rows, 1], of the winner of `argmax(weight / E)`.

    An entrant wins with the probability weight / sum of weights. `weights` is float64 [rows, n].
    """
    return (weights / exponentials(keys, ids)).argmax(dim=-1, keepdim=True)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * _MULTIPLIER_1
    x = (x ^ _shift_right(x, 27)) * _MULTIPLIER_2
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    # torch shifts int64 arithmetically: drop the copies of the sign.
    return (x >> bits) & ((1 << (64 - bits)) - 1)
