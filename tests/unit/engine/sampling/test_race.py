"""The race's frequencies are the probabilities, and its noise is a function of (seed, position, token id)."""

import pytest
import torch
from sampling_reference import exponential, request
from torch import Tensor

from services.engine.sampling import truncation, weights
from services.engine.sampling.race import exponentials, race, row_keys
from services.engine.sampling.sampler import Sampler
from shared.sampling_params import MAX_SEED, SamplingParams

DRAWS = 200_000


def frequencies(token_ids: Tensor, vocab: int) -> Tensor:
    return torch.bincount(token_ids, minlength=vocab) / len(token_ids)


@pytest.mark.parametrize("by", ["seed", "position"])
def test_race_frequencies_are_the_probabilities(by: str) -> None:
    probabilities = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    counter, fixed = torch.arange(DRAWS), torch.full((DRAWS,), 7)
    keys = row_keys(counter, fixed) if by == "seed" else row_keys(fixed, counter)
    ids = torch.tensor([[3, 40, 500, 151_000]])
    winners = race(probabilities.expand(DRAWS, -1), keys, ids).squeeze(1)
    assert (frequencies(winners, 4) - probabilities).abs().max() < 0.01


def test_exponentials_have_the_right_distribution_and_no_correlation_between_neighbours() -> None:
    e = exponentials(row_keys(torch.arange(400), torch.zeros(400, dtype=torch.int64)), torch.arange(500).unsqueeze(0))
    assert abs(float(e.mean()) - 1) < 0.01
    assert abs(float(e.var()) - 1) < 0.03
    assert abs(float((e > 2).double().mean()) - 0.1353) < 0.003
    for shifted in (e.roll(1, 0), e.roll(1, 1)):
        assert abs(float(torch.corrcoef(torch.stack([e.flatten(), shifted.flatten()]))[0, 1])) < 0.01


def test_exponentials_match_the_published_hash_and_use_every_bit_of_the_seed() -> None:
    seeds = [0, 1, *(1 << bit for bit in range(1, 63)), MAX_SEED]
    e = exponentials(row_keys(torch.tensor(seeds), torch.full((len(seeds),), 12)), torch.tensor([[0, 9, -1]]))
    for row, seed in enumerate(seeds):
        for column, token_id in enumerate((0, 9, -1)):
            assert float(e[row, column]) == pytest.approx(exponential(seed, 12, token_id), rel=1e-12)
    assert len(set(e.flatten().tolist())) == e.numel()
    assert bool((e > 0).all())


VOCAB = 24


def draw_many(params: dict, logits: Tensor, steps: int = 100) -> Tensor:
    """The frequencies of 2,000 seeds through the whole sampler, at each of so many positions."""
    sampler = Sampler(vocab_size=VOCAB, eos_token_ids=[0], device=torch.device("cpu"))
    requests = [request(seed, [1], [], SamplingParams(seed=seed, **params)) for seed in range(2000)]
    for _ in range(steps):
        for request_, result in zip(requests, sampler.sample(logits.repeat(len(requests), 1), requests), strict=True):
            assert result.token_id is not None
            request_.token_ids.append(result.token_id)
    return frequencies(torch.tensor([request_.token_ids[1:] for request_ in requests]).flatten(), VOCAB)


@pytest.mark.usefixtures("each_drawer")
@pytest.mark.parametrize(
    ("params", "leaders"),
    [
        ({}, (64, 256)),  # two heats, groups of 4 ids
        ({"temperature": 0.7}, (64, 256)),
        ({"top_k": 5}, (8,)),
        ({"top_p": 0.8}, (4, 16)),
    ],
)
def test_sampled_frequencies(params: dict, leaders: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "GROUP", 4)
    monkeypatch.setattr(truncation, "LEADERS", leaders)
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(3)) * 1.5
    probabilities = (logits.double() / params.get("temperature", 1.0)).softmax(0)
    order = probabilities.argsort(descending=True)
    cut = torch.zeros(VOCAB, dtype=torch.bool)
    if "top_k" in params:
        cut[order[params["top_k"] :]] = True
    if "top_p" in params:
        before = probabilities[order].cumsum(0) - probabilities[order]
        cut[order[before >= params["top_p"]]] = True
    expected = probabilities.masked_fill(cut, 0)
    expected /= expected.sum()
    found = draw_many(params, logits)
    assert (found - expected).abs().max() < 0.01
    assert bool((found[cut] == 0).all())


def test_the_path_that_looks_at_the_whole_row_draws_the_same_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(truncation, "LEADERS", (1,))  # leaders never suffice for top_p 0.8 here
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(3)) * 1.5
    few = draw_many({"top_p": 0.8}, logits, steps=2)
    monkeypatch.setattr(truncation, "LEADERS", (64,))
    assert few.equal(draw_many({"top_p": 0.8}, logits, steps=2))
