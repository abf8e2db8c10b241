"""Numbers that a client may ask for and a tensor cannot hold."""

from typing import Any

import pytest
import torch

from services.engine.request import Request, RequestKey
from services.engine.sampling.sampler import Sampler
from shared.sampling_params import MAX_SEED, SamplingParams, check_sampling_params

pytestmark = pytest.mark.usefixtures("each_drawer")
LARGEST = 2**64 - 1  # of msgpack's integers


@pytest.mark.parametrize(
    "asked",
    [
        {"top_k": LARGEST},
        {"top_k": LARGEST, "top_p": 0.9},
        {"top_k": 2**63, "min_p": 0.1},
        {"max_tokens": LARGEST, "min_tokens": LARGEST, "stop_token_ids": [3]},
        {"seed": MAX_SEED},
        {"repetition_penalty": 0.01, "frequency_penalty": -2.0, "logit_bias": {1: 100.0}},
        {"repetition_penalty": 100.0, "temperature": 5e-324},
        {"temperature": 100.0, "top_p": 5e-324},
        {"min_p": 5e-324, "top_p": 1 - 2**-53},
    ],
)
def test_the_largest_and_smallest_numbers_are_carried_out(asked: dict[str, Any]) -> None:
    params = SamplingParams(**asked)
    check_sampling_params(params, 100)
    sampler = Sampler(vocab_size=100, eos_token_ids=[2], device=torch.device("cpu"))
    requests = [
        Request(RequestKey(b"peer", 1), [1, 2, 3], 2, params),
        Request(RequestKey(b"peer", 2), [1, 2, 3], 2, SamplingParams(temperature=0.0)),
    ]
    logits = torch.linspace(-3, 3, 100).repeat(2, 1)
    first, second = sampler.sample(logits, requests)
    assert first.error is None
    assert second.token_id == 99
