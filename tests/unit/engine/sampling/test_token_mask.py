"""A grammar's packed mask on a batch's logits: in C and in PyTorch, for vocabularies of any size."""

from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import pytest
import torch
from sampling_reference import request as sampling_request
from torch import Tensor

from services.engine.model.kernels import load_kernels
from services.engine.sampling.sampler import Sampler
from services.engine.sampling.token_mask import TokenMask
from shared.sampling_params import SamplingParams
from tests.token_bitmask import pack

Apply = Callable[[Tensor, Tensor], None]


@pytest.fixture(params=["C", "C, two threads", "PyTorch"])
def apply(request: pytest.FixtureRequest) -> Apply:
    kernels = None if request.param == "PyTorch" else load_kernels()
    if kernels is None and request.param != "PyTorch":
        pytest.skip("there is no C compiler")
    return TokenMask(torch.device("cpu"), kernels, 2 if "two" in request.param else 1).apply


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 60, 64, 1000, 49_152, 50_257])
def test_what_has_no_bit_is_banned_and_all_else_stays(apply: Apply, vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    shares = [1.0, 0.0, 0.001, 0.03, 0.5, 0.9, 1.0, 0.999]
    allowed = rng.random((len(shares), vocab)) < np.array(shares)[:, None]
    logits = torch.randn(len(shares), vocab, generator=torch.Generator().manual_seed(vocab))
    expected = logits.masked_fill(torch.from_numpy(~allowed), -torch.inf)
    apply(logits, pack(allowed))
    assert torch.equal(logits, expected)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_broken_row_shows_under_its_mask(apply: Apply, value: float) -> None:
    logits = torch.zeros(3, 70)
    logits[1, [5, 69]] = value
    apply(logits, pack(np.zeros((3, 70), dtype=bool)))
    assert logits[1].isnan().nonzero().flatten().tolist() == [5, 69]
    assert (logits[[0, 2]] == -torch.inf).all()


def test_rows_that_a_mask_holds_elsewhere_in_memory(apply: Apply) -> None:
    allowed = np.arange(3 * 64).reshape(3, 64) % 3 == 0
    logits = torch.ones(3, 64)
    apply(logits, pack(np.repeat(allowed, 2, axis=0))[::2])
    assert torch.equal(logits == 1, torch.from_numpy(allowed))


@pytest.mark.parametrize("logprobs_mode", ["raw", "processed"])
def test_what_is_drawn_under_masks_is_the_same_in_c_and_in_pytorch(logprobs_mode: Literal["raw", "processed"]) -> None:
    vocab, shares = 5003, [0.0005, 0.002, 0.05, 0.9, 1.0]
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"seed": 1},
        {"seed": 2, "temperature": 0.01},
        {"seed": 3, "temperature": 3.0},
        {"seed": 4, "top_p": 0.8},
        {"seed": 5, "top_k": 3},
        {"seed": 6, "min_p": 0.2, "repetition_penalty": 1.3},
    ]
    rng = np.random.default_rng(0)
    for round_ in range(10):
        requests = [
            sampling_request(number, [1, 2], [], SamplingParams(logprobs=3, **kind))
            for number, kind in enumerate(kind for _ in shares for kind in kinds)
        ]
        allowed = rng.random((len(requests), vocab)) < np.repeat(shares, len(kinds))[:, None]
        allowed[:, round_] = True
        logits = torch.from_numpy(rng.normal(scale=9, size=(len(requests), vocab)).astype(np.float32))
        in_c, in_pytorch = (
            Sampler(
                vocab_size=vocab,
                eos_token_ids=[0],
                device=torch.device("cpu"),
                logprobs_mode=logprobs_mode,
                use_kernels=use_kernels,
            ).sample(logits.clone(), requests, pack(allowed))
            for use_kernels in (True, False)
        )
        assert [result.token_id for result in in_c] == [result.token_id for result in in_pytorch]
        assert all(allowed[row, result.token_id] for row, result in enumerate(in_c) if result.token_id is not None)
        for one, other in zip(in_c, in_pytorch, strict=True):
            assert one.error is None
            assert one.logprobs is not None
            assert other.logprobs is not None
            assert one.logprobs.top_token_ids == other.logprobs.top_token_ids
            assert one.logprobs.logprob == pytest.approx(other.logprobs.logprob)
