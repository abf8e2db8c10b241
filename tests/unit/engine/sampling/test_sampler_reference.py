"""The batched sampler equals the row-by-row reference exactly, for any mix of parameters, ties included."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sampling_reference import draw, request

from services.engine.request import Request
from services.engine.sampling import truncation
from services.engine.sampling.sampler import Sampler
from shared.sampling_params import MAX_SEED, SamplingParams

pytestmark = pytest.mark.usefixtures("each_drawer", "small_constants")
GROUP = 16
EOS = (2, 5)
relaxed = settings(
    deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


@st.composite
def sampling_params(draw_value: st.DrawFn, vocab: int) -> SamplingParams:
    token = st.integers(0, vocab - 1)

    def sometimes(value: st.SearchStrategy, otherwise: object):
        return draw_value(st.one_of(st.just(otherwise), value))

    return SamplingParams(
        max_tokens=1000,
        temperature=draw_value(st.sampled_from([0.0, 1e-40, 1e-6, 0.3, 0.7, 1.0, 1.7, 100.0])),
        top_p=sometimes(st.sampled_from([1e-9, 0.1, 0.25, 0.5, 0.75, 0.9, 0.999]), 1.0),
        top_k=sometimes(st.integers(1, vocab + 3), 0),
        min_p=sometimes(st.sampled_from([1e-6, 0.05, 0.25, 0.5, 1.0]), 0.0),
        seed=draw_value(st.integers(0, MAX_SEED)),
        min_tokens=sometimes(st.integers(0, 4), 0),
        ignore_eos=draw_value(st.booleans()),
        stop_token_ids=sometimes(st.lists(token, max_size=3), []),
        repetition_penalty=sometimes(st.sampled_from([0.5, 1.1, 2.0]), 1.0),
        frequency_penalty=sometimes(st.sampled_from([-1.5, 0.25, 2.0]), 0.0),
        presence_penalty=sometimes(st.sampled_from([-0.5, 1.0]), 0.0),
        logit_bias=sometimes(st.dictionaries(token, st.sampled_from([-100.0, -1.5, 0.5, 100.0]), max_size=4), {}),
        allowed_token_ids=sometimes(st.lists(token, min_size=1, max_size=vocab), None),
        bad_words_token_ids=sometimes(st.lists(st.lists(token, min_size=1, max_size=3), max_size=4), []),
    )


@st.composite
def batches(draw_value: st.DrawFn) -> tuple[list[list[float]], list[Request]]:
    vocab = draw_value(st.sampled_from([7, 33, 64, 77]))
    # Few different values make many ties, -0.0 and 0.0 among them; real numbers make few.
    value = draw_value(
        st.sampled_from(
            [
                st.sampled_from([-math.inf, -2.0, -0.0, 0.0, 0.5, 1.0, 3.0]),
                st.floats(-8, 8, width=32),
                st.sampled_from([1.25]),
            ]
        )
    )
    # Tokens that repeat, so that the ends of bad words are met and counts are over 1.
    tokens = st.lists(st.integers(0, min(vocab - 1, 6)), max_size=6)
    logits, requests = [], []
    for number in range(draw_value(st.integers(1, 5))):
        logits.append(draw_value(st.lists(value, min_size=vocab, max_size=vocab)))
        prompt = [1, *draw_value(tokens)]
        requests.append(request(number, prompt, draw_value(tokens), draw_value(sampling_params(vocab))))
    return logits, requests


def make_sampler(vocab: int, **options) -> Sampler:
    return Sampler(vocab_size=vocab, eos_token_ids=EOS, device=torch.device("cpu"), **options)


@relaxed
@given(batches())
def test_every_row_equals_the_reference_and_goes_on_equal_to_it(batch) -> None:
    logits, requests = batch
    vocab = len(logits[0])
    sampler = make_sampler(vocab)
    for _ in range(3):  # the first step builds each row's state, the others update it
        sampled = sampler.sample(torch.tensor(logits).reshape(len(requests), vocab), requests)
        for row, request_, result in zip(logits, requests, sampled, strict=True):
            n = request_.num_prompt_tokens
            expected = draw(row, request_.token_ids[:n], request_.token_ids[n:], request_.sampling, EOS, GROUP).token_id
            assert result.token_id == expected
            assert (result.error is None) == (expected is not None)
        requests = [r for r, result in zip(requests, sampled, strict=True) if result.token_id is not None]
        logits = [row for row, result in zip(logits, sampled, strict=True) if result.token_id is not None]
        tokens = [result.token_id for result in sampled if result.token_id is not None]
        for request_, token in zip(requests, tokens, strict=True):
            request_.token_ids.append(token)


@relaxed
@given(batches())
def test_the_survivors_are_the_references_on_whichever_path_they_are_found(batch) -> None:
    logits, requests = batch
    seen: dict[int, set[int]] = {}

    def spying_race(weights, keys, ids):
        for row_weights, key, row_ids in zip(weights, keys.flatten().tolist(), ids.expand_as(weights), strict=True):
            seen[key] = set(row_ids[row_weights > 0].tolist())  # the last path tried is the one that holds
        return real_race(weights, keys, ids)

    real_race = truncation.race
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(truncation, "race", spying_race)
        for row, request_ in zip(logits, requests, strict=True):
            seen.clear()
            result = make_sampler(len(row), use_kernels=False).sample(torch.tensor([row]), [request_])[0]
            n = request_.num_prompt_tokens
            expected = draw(row, request_.token_ids[:n], request_.token_ids[n:], request_.sampling, EOS, GROUP)
            if result.token_id is not None and seen:
                assert seen.popitem()[1] == set(expected.survivors)


@relaxed
@given(batches(), st.randoms(use_true_random=False))
def test_a_row_does_not_depend_on_its_batch(batch, random) -> None:
    logits, requests = batch
    together = make_sampler(len(logits[0]), logprobs_mode="processed").sample(torch.tensor(logits), requests)
    order = list(range(len(requests)))
    random.shuffle(order)
    sampler = make_sampler(len(logits[0]), logprobs_mode="processed")
    shuffled = sampler.sample(torch.tensor([logits[row] for row in order]), [requests[row] for row in order])
    assert [together[row] for row in order] == shuffled
    for row, request_ in enumerate(requests):
        alone = make_sampler(len(logits[0]), logprobs_mode="processed").sample(torch.tensor([logits[row]]), [request_])
        assert alone == [together[row]]


@relaxed
@given(batches())
def test_greedy_equals_top_k_1_equals_temperature_0(batch) -> None:
    logits, requests = batch
    results = []
    for changes in ({"temperature": 0.0}, {"top_k": 1}, {"temperature": 0.0, "top_k": 1}):
        for request_ in requests:
            fields = {name: getattr(request_.sampling, name) for name in SamplingParams.__struct_fields__}
            request_.sampling = SamplingParams(**{**fields, **changes})
        results.append(make_sampler(len(logits[0])).sample(torch.tensor(logits), requests))
    assert results[0] == results[1] == results[2]
