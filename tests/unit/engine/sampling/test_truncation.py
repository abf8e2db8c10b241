"""Survivors at exact borders and ties, on each path: few leaders, more leaders, the whole row."""

import math

import pytest
import torch
from sampling_reference import request

from services.engine.sampling import ordering, truncation
from services.engine.sampling.sampler import Sampler
from shared.sampling_params import SamplingParams

VOCAB = 33  # a whole number of blocks of 4, and one token
TIED = [0.0] * VOCAB
FOUR = [0.0] * 4 + [-math.inf] * (VOCAB - 4)
LAST_IS_BEST = [float(token) for token in range(VOCAB)]


@pytest.mark.parametrize("leaders", [(6, 14), (2, 12), (1,), (64,)])
@pytest.mark.parametrize(
    ("logits", "params", "survivors"),
    [
        (TIED, {"top_k": 3}, range(3)),
        (TIED, {"top_k": 20}, range(20)),
        (TIED, {"top_k": 32}, range(32)),
        (TIED, {"min_p": 1.0}, range(33)),
        (TIED, {"top_k": 8, "top_p": 0.5}, range(4)),
        (FOUR, {"top_p": 0.25}, range(1)),
        (FOUR, {"top_p": 0.5}, range(2)),
        (FOUR, {"top_p": 0.75}, range(3)),
        (FOUR, {"top_p": 0.76}, range(4)),
        (FOUR, {"top_k": 10}, range(4)),
        (FOUR, {"top_k": 4, "top_p": 0.5}, range(2)),
        (LAST_IS_BEST, {"top_k": 2}, [31, 32]),
        (LAST_IS_BEST, {"top_p": 0.3}, [32]),
        (LAST_IS_BEST, {"top_p": 1e-12}, [32]),
        (LAST_IS_BEST, {"top_p": 0.9}, [30, 31, 32]),  # 0.632, 0.233, 0.086
        (LAST_IS_BEST, {"min_p": 0.1, "top_p": 0.9}, [31, 32]),  # of three that min_p leaves: 0.665, 0.245, 0.090
        (LAST_IS_BEST, {"min_p": 0.1}, [30, 31, 32]),  # 1, 0.368, 0.135
        ([1.0, 3.0, 3.0, 2.0, 2.0] + [0.0] * 28, {"top_k": 3}, [1, 2, 3]),
    ],
)
def test_survivors(logits, params, survivors, leaders, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[set[int]] = []
    real_race = truncation.race

    def spying_race(weights, keys, ids):
        found.append(set(ids[weights > 0].tolist()))
        return real_race(weights, keys, ids)

    monkeypatch.setattr(ordering, "BLOCK", 4)
    monkeypatch.setattr(truncation, "LEADERS", leaders)
    monkeypatch.setattr(truncation, "race", spying_race)
    sampler = Sampler(vocab_size=VOCAB, eos_token_ids=[2], device=torch.device("cpu"), use_kernels=False)
    result = sampler.sample(torch.tensor([logits]), [request(0, [1], [], SamplingParams(seed=4, **params))])[0]
    assert found[-1] == set(survivors)  # the last path tried is the one that holds
    assert result.token_id in set(survivors)


@pytest.mark.parametrize("block", [4, 5, 32, 64])
@pytest.mark.parametrize("count", [1, 3, 7, 32, 33, 50])
def test_leaders_are_the_rows_first_tokens(block: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ordering, "BLOCK", block)
    logits = (torch.randn(40, VOCAB, generator=torch.Generator().manual_seed(block)) * 3).round()
    logits[0] = 0.0
    logits[1, ::2] = -0.0
    maxima = ordering.block_maxima(logits)
    assert maxima.amax(1).equal(logits.amax(1))
    found = ordering.leaders(logits, maxima, torch.arange(40), count)
    exact, exact_ids = ordering.exact_leaders(logits, maxima, min(count, VOCAB))
    assert ordering.first_tokens(logits, maxima, torch.arange(40)).equal(logits.argmax(1))
    for row in range(40):
        order = sorted(range(VOCAB), key=lambda token: (-float(logits[row, token]), token))[:count]
        certain = found.ids[row][found.certain[row]].tolist()
        assert certain == order[: len(certain)]
        assert found.logits[row].tolist() == logits[row, order].tolist()
        assert len(certain) == sum(float(v) > float(logits[row, order[-1]]) for v in logits[row]) or found.complete
        assert exact_ids[row].tolist() == order
        assert exact[row].tolist() == logits[row, order].tolist()
