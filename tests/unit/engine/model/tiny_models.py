"""Tiny random-weight models of each family, and prompts for them."""

import random
from pathlib import Path
from typing import Any

import torch
import transformers
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


def random_prompts(lengths: list[int], vocab_size: int = 101) -> list[list[int]]:
    rng = random.Random(3)
    return [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]
