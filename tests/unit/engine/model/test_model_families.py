"""Tiny random-weight models of each family give transformers' logits: whole, in chunks, over scattered blocks,
step by step, in one batch, with the C kernels and without."""

from pathlib import Path

import pytest
import torch
from model_driver import Driver, RecordingSampler, make_executor
from tiny_models import FAMILIES, NATIVE, random_prompts, save_model
from torch import nn


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, nn.Module]:
    folder = tmp_path_factory.mktemp(request.param)
    return folder, save_model(FAMILIES[request.param](), folder)


@pytest.mark.parametrize("use_kernels", [True, False], ids=["kernels", "torch"])
@pytest.mark.parametrize("budget", [1 << 30, 7], ids=["whole", "chunked"])
def test_logits_equal_those_of_transformers(family: tuple[Path, nn.Module], use_kernels: bool, budget: int) -> None:
    folder, reference = family
    sampler = RecordingSampler()
    executor = make_executor(folder, sampler, use_kernels=use_kernels)
    prompts = random_prompts([1, 5, 23, 40])
    outputs = Driver(executor, budget=budget).run(prompts, max_tokens=6, score_prompts=True)
    for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        with torch.inference_mode():
            expected = reference(torch.tensor([prompt + output[:-1]])).logits[0]
        got = torch.stack([sampler.logits[i][position] for position in range(len(expected))])
        assert expected.std() > 0.3
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", list(NATIVE))
def test_a_request_gets_the_same_bits_alone_and_in_company(name: str, dtype: str, tmp_path: Path) -> None:
    save_model(NATIVE[name](), tmp_path)
    prompts = random_prompts([1, 2, 18, 33, 50])

    def logits(budget: int, together: bool, preempt_every: int = 0) -> list[dict[int, torch.Tensor]]:
        sampler = RecordingSampler()
        executor = make_executor(tmp_path, sampler, dtype=dtype)
        seen: list[dict[int, torch.Tensor]] = []
        for batch in [prompts] if together else [[prompt] for prompt in prompts]:
            Driver(executor, budget=budget, preempt_every=preempt_every).run(batch, max_tokens=8)
            seen += [sampler.logits[i] for i in range(len(batch))]
            sampler.logits = {}
        return seen

    alone = logits(1 << 30, together=False)
    for other in (logits(1 << 30, True), logits(9, True), logits(9, False), logits(16, True, preempt_every=5)):
        for a, b in zip(alone, other, strict=True):
            assert a.keys() == b.keys()
            for position in a:
                assert torch.equal(a[position], b[position])


def test_bfloat16_stays_close_to_float32(tmp_path: Path) -> None:
    save_model(NATIVE["qwen3"](), tmp_path)
    prompts = random_prompts([30])
    for use_kernels in (True, False):
        samplers = [RecordingSampler(), RecordingSampler()]
        for dtype, sampler in zip(("float32", "bfloat16"), samplers, strict=True):
            executor = make_executor(tmp_path, sampler, dtype=dtype, use_kernels=use_kernels)
            Driver(executor).run(prompts, max_tokens=1)
        wide, narrow = (sampler.logits[0][29].float() for sampler in samplers)
        assert (wide - narrow).abs().max() < 0.1 * wide.abs().max()
