"""SmolLM2's logits are the same bits however its requests are run (tests/integration/test_engine_equivalence.py
compares the tokens, with transformers too)."""

from pathlib import Path

import pytest
import torch
from model_driver import Driver, RecordingSampler, make_executor
from smollm2_prompts import smollm2_prompts


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_are_the_same_bits_alone_in_company_and_in_chunks(smollm2: Path, dtype: str) -> None:
    prompts = smollm2_prompts(smollm2)
    sampler = RecordingSampler()
    executor = make_executor(smollm2, sampler, block_size=16, num_kv_blocks=256, dtype=dtype)
    if type(executor._attention).__name__ != "KernelAttention":
        pytest.skip("no C compiler here; PyTorch's attention makes no such promise")

    def logits(budget: int, batch: list[list[int]]) -> dict[int, dict[int, torch.Tensor]]:
        sampler.logits = {}
        Driver(executor, budget=budget).run(batch, max_tokens=6)
        return sampler.logits

    alone = logits(1 << 30, prompts[:1])[0]
    others = [logits(1 << 30, prompts)[0], logits(13, prompts[:3])[0], logits(1 << 30, prompts[:2])[0]]
    torch.set_num_threads(2)
    try:
        others.append(logits(1 << 30, prompts[:4])[0])
    finally:
        torch.set_num_threads(1)
    for other in others:
        assert alone.keys() == other.keys()
        for position, row in alone.items():
            assert torch.equal(row, other[position])
