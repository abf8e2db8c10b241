"""One row, one token, written plainly from the definition of each parameter: what the sampler must equal."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from services.engine.request import Request, RequestKey
from shared.sampling_params import SamplingParams


@dataclass
class Draw:
    token_id: int | None  # None: the row fails
    survivors: list[int]  # in order, best first
    weights: dict[int, int]
    logits: list[np.float32]  # before temperature


def edited(logits: Sequence[float], prompt: list[int], output: list[int], params: SamplingParams, eos: Sequence[int]):
    x = [np.float32(value) for value in logits]
    banned: set[int] = set()
    if params.allowed_token_ids is not None:
        banned |= set(range(len(x))) - set(params.allowed_token_ids)
    for word in params.bad_words_token_ids:
        beginning = word[:-1]
        if output[len(output) - len(beginning) :] == beginning:
            banned.add(word[-1])
    if len(output) < params.min_tokens:
        banned |= set(eos) | set(params.stop_token_ids)
    for token in banned:
        x[token] = np.float32("nan") if math.isnan(x[token]) else np.float32("-inf")
    for token, bias in params.logit_bias.items():
        x[token] += np.float32(bias)
    for token in set(prompt) | set(output):
        penalty = np.float32(params.repetition_penalty)
        x[token] = x[token] / penalty if x[token] > 0 else x[token] * penalty
    for token in set(output):
        x[token] -= np.float32(params.frequency_penalty) * np.float32(output.count(token))
        x[token] -= np.float32(params.presence_penalty)
    return x


def draw(
    logits: Sequence[float],
    prompt: list[int],
    output: list[int],
    params: SamplingParams,
    eos: Sequence[int],
    group: int,
) -> Draw:
    x = edited(logits, prompt, output, params, eos)
    vocab = len(x)
    if any(math.isnan(value) for value in x) or not math.isfinite(max(x)):
        return Draw(None, [], {}, x)
    order = sorted(range(vocab), key=lambda token: (-x[token], token))
    if params.temperature == 0 or params.top_k == 1:
        return Draw(order[0], [order[0]], {order[0]: 1}, x)

    scale = 2 ** (53 - math.ceil(math.log2(vocab)))
    temperature = np.float32(max(params.temperature, 1e-30))
    with np.errstate(over="ignore"):
        depth = [(value - x[order[0]]) / temperature for value in x]
    weights = [round(float(power_of_e(d)) * scale) for d in depth]

    alive = [token for token in order if weights[token] > 0 and weights[token] >= params.min_p * scale]
    if params.top_k:
        alive = alive[: params.top_k]
    total, before, kept = sum(weights[token] for token in alive), 0, []
    for token in alive:
        if params.top_p < 1 and before >= params.top_p * total:
            break
        kept.append(token)
        before += weights[token]

    position = len(prompt) + len(output)
    truncated = params.min_p > 0 or params.top_p < 1 or 0 < params.top_k < vocab
    racers = kept
    if not truncated:
        groups = sorted({token // group for token in kept})
        masses = {g: sum(weights[token] for token in kept if token // group == g) for g in groups}
        winner = max(groups, key=lambda g: masses[g] / exponential(params.seed, position, -1 - g))
        racers = [token for token in kept if token // group == winner]
    token = max(racers, key=lambda token: weights[token] / exponential(params.seed, position, token))
    return Draw(token, kept, {token: weights[token] for token in kept}, x)


def power_of_e(x: np.float32) -> np.float32:
    """e^x for x up to 0, operation by operation in float32: whole octaves, and a polynomial for what is left of one."""
    f = np.float32
    octaves = max(x, f(-64)) * f(math.log2(math.e))
    whole = f(round(octaves))
    rest = f(round(float(octaves - whole) * 2**21)) / f(2**21)
    power = f(0)
    for coefficient in (0.0013264727, 0.009671513, 0.055507336, 0.24022242, 0.693147, 1):
        power = power * rest + f(coefficient)
    return power * f(2) ** whole


_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


def _splitmix64(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def exponential(seed: int, position: int, token_id: int) -> float:
    key = _splitmix64((_splitmix64((seed + _GOLDEN) & _MASK) + position * _GOLDEN) & _MASK)
    bits = _splitmix64((key + (token_id + 1) * _GOLDEN) & _MASK)
    return -math.log(((bits >> 12) + 0.5) * 2.0**-52)


def request(number: int, prompt: list[int], output: list[int], params: SamplingParams) -> Request:
    return Request(RequestKey(b"frontend", number), [*prompt, *output], len(prompt), params)
