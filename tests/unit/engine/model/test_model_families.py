"""Tiny random-weight models of each family give transformers' logits: whole, in chunks, over scattered blocks,
step by step, in one batch, with the C kernels and without."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from model_driver import Driver, RecordingSampler, make_executor
from torch import nn

SIZES: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GQA = SIZES | {"num_key_value_heads": 2}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}

NATIVE = {
    "llama": lambda: transformers.LlamaConfig(**GQA, tie_word_embeddings=False),
    "llama-tied-llama3-rope": lambda: transformers.LlamaConfig(
        **GQA, tie_word_embeddings=True, rope_parameters=LLAMA3_ROPE
    ),
    "llama-biased-yarn": lambda: transformers.LlamaConfig(
        **SIZES, attention_bias=True, mlp_bias=True, rope_parameters=YARN_ROPE
    ),
    "llama-linear-rope-wide-heads": lambda: transformers.LlamaConfig(
        **GQA, head_dim=72, rope_parameters={"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}
    ),
    "mistral": lambda: transformers.MistralConfig(**GQA, sliding_window=None),
    "mistral-window": lambda: transformers.MistralConfig(**GQA, sliding_window=7),
    "qwen2": lambda: transformers.Qwen2Config(**GQA),
    "qwen2-window": lambda: transformers.Qwen2Config(
        **GQA, use_sliding_window=True, sliding_window=9, max_window_layers=1
    ),
    "qwen3": lambda: transformers.Qwen3Config(**GQA, head_dim=32, tie_word_embeddings=True),
}
OTHERS = {
    "gpt-neox": lambda: transformers.GPTNeoXConfig(**SIZES, use_parallel_residual=True),
    "gpt-neox-serial": lambda: transformers.GPTNeoXConfig(**SIZES, use_parallel_residual=False),
    "gemma": lambda: transformers.GemmaConfig(**GQA, head_dim=16),
    "gemma2": lambda: transformers.Gemma2Config(
        **GQA, head_dim=16, sliding_window=6, attn_logit_softcapping=5.0, final_logit_softcapping=8.0
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(**GQA, head_dim=16, sliding_window=6),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=101, n_embd=48, n_layer=2, n_head=4, n_positions=128, bos_token_id=1, eos_token_id=2
    ),
}
FAMILIES = NATIVE | OTHERS


def save_model(config: Any, folder: Path) -> nn.Module:
    """A model whose every parameter matters, biases and norms too; its logits spread over several units."""
    torch.manual_seed(11)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.15)
            elif "norm" in name or "ln_" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0, 0.1)
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, nn.Module]:
    folder = tmp_path_factory.mktemp(request.param)
    return folder, save_model(FAMILIES[request.param](), folder)


def random_prompts(lengths: list[int], vocab_size: int = 101) -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]


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
