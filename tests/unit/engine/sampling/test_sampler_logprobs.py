"""Logprobs, ranks and alternatives: raw and processed, of outputs and of prompts."""

import math

import pytest
import torch
from sampling_reference import draw, request

from services.engine.sampling import ordering
from services.engine.sampling.sampler import Sampler
from shared.protocol import TokenLogprobs
from shared.sampling_params import SamplingParams

pytestmark = pytest.mark.usefixtures("each_drawer")
VOCAB = 90


def make_sampler(**options) -> Sampler:
    return Sampler(vocab_size=VOCAB, eos_token_ids=[2], device=torch.device("cpu"), **options)


def logits_of(rows: int, ties: bool = False) -> torch.Tensor:
    logits = torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(4)) * 2
    return logits.round() if ties else logits


def check(entry: TokenLogprobs | None, logits: torch.Tensor, token_id: int, count: int) -> None:
    """`logits` [vocab] are of the distribution that the entry must describe."""
    assert entry is not None
    logprobs = logits.double().log_softmax(0)
    order = sorted(range(VOCAB), key=lambda token: (-float(logits[token]), token))[:count]
    order = [token for token in order if logprobs[token] > -math.inf]
    assert entry.token_id == token_id
    assert entry.logprob == pytest.approx(float(logprobs[token_id]), abs=1e-5)
    assert entry.rank == 1 + sum(float(value) > float(logits[token_id]) for value in logits)
    assert entry.top_token_ids == order
    assert entry.top_logprobs == pytest.approx([float(logprobs[token]) for token in order], abs=1e-5)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("block", [32, 3])
def test_raw_logprobs_are_the_models_whatever_else_is_asked_for(ties, block, monkeypatch) -> None:
    monkeypatch.setattr(ordering, "BLOCK", block)
    asked: list[tuple[int | None, dict]] = [
        (0, {}),
        (20, {"temperature": 0.3, "top_k": 5}),
        (None, {}),
        (1, {"temperature": 0.0, "logit_bias": {5: 100.0}}),
        (7, {"repetition_penalty": 2.0, "top_p": 0.5, "allowed_token_ids": [8, 9, 10]}),
    ]
    requests = [request(i, [1, 3], [8], SamplingParams(seed=i, logprobs=n, **p)) for i, (n, p) in enumerate(asked)]
    logits = logits_of(len(asked), ties)
    sampled = make_sampler().sample(logits.clone(), requests)
    for row, ((count, _), result) in enumerate(zip(asked, sampled, strict=True)):
        assert result.token_id is not None
        if count is None:
            assert result.logprobs is None
        else:
            check(result.logprobs, logits[row], result.token_id, count)
    assert sampled[3].token_id == 5


@pytest.mark.parametrize("ties", [False, True])
def test_processed_logprobs_are_of_the_distribution_drawn_from(ties: bool) -> None:
    asked = [
        {"temperature": 0.5},
        {"temperature": 0.7, "top_k": 5},
        {"top_p": 0.4, "frequency_penalty": 1.0},
        {"min_p": 0.2, "allowed_token_ids": list(range(40))},
        {"temperature": 0.0, "logit_bias": {5: 3.0}, "repetition_penalty": 1.5},
        {"top_k": 1},
    ]
    requests = [request(i, [1, 3], [8], SamplingParams(seed=i, logprobs=20, **p)) for i, p in enumerate(asked)]
    logits = logits_of(len(asked), ties)
    sampled = make_sampler(logprobs_mode="processed").sample(logits.clone(), requests)
    for row, (request_, result) in enumerate(zip(requests, sampled, strict=True)):
        params = request_.sampling
        expected = draw(logits[row].tolist(), [1, 3], [8], params, [2], 512)
        distribution = torch.tensor(expected.logits)
        if params.temperature > 0 and params.top_k != 1:
            kept = distribution / params.temperature
            distribution = torch.full_like(kept, -math.inf)
            distribution[expected.survivors] = kept[expected.survivors]
        assert result.token_id == expected.token_id
        check(result.logprobs, distribution, result.token_id or 0, 20)


@pytest.mark.parametrize("mode", ["raw", "processed"])
@pytest.mark.parametrize("count", [0, 3, 20])
def test_prompt_logprobs_are_the_models_in_both_modes(mode, count) -> None:
    logits = logits_of(150)  # more than are worked on at once
    following = [(7 * row) % VOCAB for row in range(150)]
    entries = make_sampler(logprobs_mode=mode).prompt_logprobs(logits.clone(), following, count)
    for row, entry in enumerate(entries):
        check(entry, logits[row], following[row], count)
    assert make_sampler().prompt_logprobs(torch.zeros(0, VOCAB), [], 3) == []


def test_prompt_logprobs_refuse_what_they_cannot_tell() -> None:
    for token_id in (-1, VOCAB):
        with pytest.raises(ValueError, match="outside the vocabulary"):
            make_sampler().prompt_logprobs(logits_of(2), [1, token_id], 0)
    broken = logits_of(2)
    broken[1, 3] = math.nan
    with pytest.raises(ValueError, match="NaN"):
        make_sampler().prompt_logprobs(broken, [1, 2], 0)
    with pytest.raises(ValueError, match="positions"):
        make_sampler().prompt_logprobs(logits_of(2), [1], 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_raw_logprobs_of_some_rows_of_batches_of_every_size(dtype: torch.dtype) -> None:
    sampler = make_sampler()
    for rows in (3, 7, 1, 5):
        logits = logits_of(rows).to(dtype)
        requests = [
            request(row, [1], [], SamplingParams(seed=row, logit_bias={3: 9.0}, logprobs=None if row == 1 else 4))
            for row in range(rows)
        ]
        for row, result in enumerate(sampler.sample(logits.clone(), requests)):
            if row == 1:
                assert result.logprobs is None
            else:
                check(result.logprobs, logits[row].float(), result.token_id or 0, 4)
