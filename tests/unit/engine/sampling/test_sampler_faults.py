"""What is wrong with one request, or with its logits, ends that request alone."""

import math

import pytest
import torch
from sampling_reference import request

from services.engine.sampling import truncation
from services.engine.sampling.sampler import NOT_FINITE, NOTHING_ALLOWED, Sampler
from shared.sampling_params import SamplingParams

pytestmark = pytest.mark.usefixtures("each_drawer")
VOCAB = 100
KINDS = [
    SamplingParams(temperature=0.0),
    SamplingParams(seed=5),
    SamplingParams(seed=5, top_p=0.9),
    SamplingParams(seed=5, top_k=70, min_p=0.01),
    SamplingParams(seed=5, logprobs=3, top_p=0.5),
    SamplingParams(seed=5, allowed_token_ids=[1, 2], repetition_penalty=1.3, max_tokens=9),
]


@pytest.fixture(autouse=True, params=[(64, 256), (2, 8)], ids=["settled by leaders", "whole rows"])
def leaders(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(truncation, "LEADERS", request.param)


def make_sampler(**options) -> Sampler:
    return Sampler(vocab_size=VOCAB, eos_token_ids=[2], device=torch.device("cpu"), **options)


def logits_of(rows: int) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("mode", ["raw", "processed"])
@pytest.mark.parametrize("params", KINDS)
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("where", [0, 50, VOCAB - 1, slice(None)])
def test_nan_or_infinity_in_a_row_fails_that_request_alone(params, value, where, mode) -> None:
    logits = logits_of(3)
    requests = [
        request(i, [1, 7], [], p)
        for i, p in enumerate([SamplingParams(seed=1), params, SamplingParams(seed=2, top_p=0.7)])
    ]
    undisturbed = make_sampler(logprobs_mode=mode).sample(logits.clone(), requests)
    logits[1, where] = value
    sampled = make_sampler(logprobs_mode=mode).sample(logits, requests)
    assert sampled[1].error == NOT_FINITE
    assert (sampled[1].token_id, sampled[1].logprobs) == (None, None)
    assert [sampled[0], sampled[2]] == [undisturbed[0], undisturbed[2]]


@pytest.mark.parametrize("params", KINDS)
def test_a_row_with_every_token_masked_fails_with_a_clear_error(params: SamplingParams) -> None:
    logits = logits_of(2)
    logits[0] = -math.inf
    sampled = make_sampler().sample(logits, [request(0, [1], [], params), request(1, [1], [], params)])
    assert sampled[0].error == NOTHING_ALLOWED
    assert sampled[1].error is None


def test_parameters_that_together_mask_everything() -> None:
    params = SamplingParams(allowed_token_ids=[2], min_tokens=1)
    bad_word = SamplingParams(allowed_token_ids=[4], bad_words_token_ids=[[4]])
    sampled = make_sampler().sample(logits_of(2), [request(0, [1], [], params), request(1, [1], [], bad_word)])
    assert [result.error for result in sampled] == [NOTHING_ALLOWED, NOTHING_ALLOWED]


HOSTILE = [-1, -VOCAB, VOCAB, 10**6, 2**62]


@pytest.mark.parametrize("token_id", HOSTILE)
@pytest.mark.parametrize(
    "make",
    [
        lambda i: SamplingParams(logit_bias={i: 5.0}),
        lambda i: SamplingParams(allowed_token_ids=[3, i]),
        lambda i: SamplingParams(stop_token_ids=[i], min_tokens=1),
        lambda i: SamplingParams(bad_words_token_ids=[[i]]),
        lambda i: SamplingParams(bad_words_token_ids=[[1, i]]),
    ],
)
def test_an_id_outside_the_vocabulary_fails_its_request_and_leaves_the_neighbours_as_they_were(make, token_id) -> None:
    good = SamplingParams(temperature=0.0, logprobs=5)
    alone = make_sampler().sample(logits_of(3), [request(i, [1], [], good) for i in range(3)])
    requests = [request(0, [1], [], good), request(1, [1], [], make(token_id)), request(2, [1], [], good)]
    sampled = make_sampler().sample(logits_of(3), requests)
    assert str(token_id) in (sampled[1].error or "")
    assert [sampled[0], sampled[2]] == [alone[0], alone[2]]


@pytest.mark.parametrize("token_id", HOSTILE)
def test_a_prompt_id_outside_the_vocabulary_cannot_be_penalized_into_a_neighbours_row(token_id: int) -> None:
    good = SamplingParams(temperature=0.0, logprobs=5)
    alone = make_sampler().sample(logits_of(3), [request(i, [1], [], good) for i in range(3)])
    bad = request(1, [1, token_id], [], SamplingParams(repetition_penalty=2.0))
    sampled = make_sampler().sample(logits_of(3), [request(0, [1], [], good), bad, request(2, [1], [], good)])
    assert "outside the vocabulary (0 to 99)" in (sampled[1].error or "")
    assert [sampled[0], sampled[2]] == [alone[0], alone[2]]


@pytest.mark.parametrize("temperature", [5e-324, 1e-45, 1e-38, 1e-10, 1e-5, 100.0])
def test_extreme_temperatures_give_tokens(temperature: float) -> None:
    logits = torch.tensor([[3e38, -3e38, 0.0, 1.0] * 25, [-math.inf] * 99 + [0.0], [1e-30] * 100])
    for params in ({"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.1}, {}):
        requests = [
            request(i, [1], [], SamplingParams(temperature=temperature, logprobs=2, **params)) for i in range(3)
        ]
        for mode in ("raw", "processed"):
            sampled = make_sampler(logprobs_mode=mode).sample(logits.clone(), requests)
            assert all(result.error is None for result in sampled)
            assert all(result.logprobs and math.isfinite(result.logprobs.logprob) for result in sampled)
            assert sampled[1].token_id == 99


def test_a_tiny_temperature_equals_greedy_where_nothing_ties() -> None:
    logits = logits_of(4)
    greedy = make_sampler().sample(
        logits.clone(), [request(i, [1], [], SamplingParams(temperature=0.0)) for i in range(4)]
    )
    cold = make_sampler().sample(
        logits, [request(i, [1], [], SamplingParams(temperature=1e-40, seed=i)) for i in range(4)]
    )
    assert greedy == cold


def test_an_error_does_not_advance_the_request() -> None:
    sampler = make_sampler()
    broken = request(0, [1], [], SamplingParams(seed=3))
    assert sampler.sample(torch.full((1, VOCAB), math.nan), [broken])[0].error
    assert sampler.sample(logits_of(1), [broken]) == make_sampler().sample(logits_of(1), [broken])


def test_shapes_that_do_not_fit_are_the_callers_mistake() -> None:
    requests = [request(0, [1], [], SamplingParams())]
    for shape in ((2, VOCAB), (1, VOCAB + 1), (VOCAB,)):
        with pytest.raises(ValueError, match=r"\[1 requests, 100 tokens\]"):
            make_sampler().sample(torch.zeros(shape), requests)
    with pytest.raises(ValueError, match="bitmask"):
        make_sampler().sample(logits_of(1), requests, torch.zeros(1, 3, dtype=torch.int32))
    with pytest.raises(ValueError, match="eos"):
        Sampler(vocab_size=VOCAB, eos_token_ids=[VOCAB], device=torch.device("cpu"))
    assert make_sampler().sample(torch.zeros(0, VOCAB), []) == []
