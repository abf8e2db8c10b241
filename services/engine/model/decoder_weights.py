"""The native decoder's weights as a checkpoint of the Llama family names them, layer by layer.

Query, key and value projections come as one matrix, gate and up projections too. `decoder` and `cpu_decoder` build
their products from these.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from services.engine.model.decoder_config import DecoderConfig
from services.engine.model.weights import Checkpoint

Take = Callable[..., Tensor]  # (name, *shape) -> the tensor, on the device and in the type that the model runs in


@dataclass(frozen=True, slots=True)
class Matrix:
    """weight [outputs, inputs], bias [outputs]"""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    attention_norm: Tensor
    qkv: Matrix
    query_norm: Tensor | None  # [head_dim]; Qwen3 norms each head before the rotation
    key_norm: Tensor | None
    output: Matrix
    mlp_norm: Tensor
    gate_up: Matrix
    down: Matrix


def take_layer(config: DecoderConfig, i: int, take: Take) -> LayerWeights:
    prefix = f"model.layers.{i}"
    hidden, inner = config.hidden_size, config.intermediate_size
    query_size, kv_size = config.query_heads * config.head_dim, config.kv_heads * config.head_dim

    def fused(parts: list[tuple[str, int]], bias: bool) -> Matrix:
        weight = torch.cat([take(f"{prefix}.{name}.weight", size, hidden) for name, size in parts])
        biases = torch.cat([take(f"{prefix}.{name}.bias", size) for name, size in parts]) if bias else None
        return Matrix(weight, biases)

    def single(name: str, out_size: int, in_size: int, bias: bool) -> Matrix:
        return Matrix(
            take(f"{prefix}.{name}.weight", out_size, in_size),
            take(f"{prefix}.{name}.bias", out_size) if bias else None,
        )

    return LayerWeights(
        attention_norm=take(f"{prefix}.input_layernorm.weight", hidden),
        qkv=fused(
            [("self_attn.q_proj", query_size), ("self_attn.k_proj", kv_size), ("self_attn.v_proj", kv_size)],
            config.qkv_bias,
        ),
        query_norm=take(f"{prefix}.self_attn.q_norm.weight", config.head_dim) if config.head_norms else None,
        key_norm=take(f"{prefix}.self_attn.k_norm.weight", config.head_dim) if config.head_norms else None,
        output=single("self_attn.o_proj", hidden, query_size, config.output_bias),
        mlp_norm=take(f"{prefix}.post_attention_layernorm.weight", hidden),
        gate_up=fused([("mlp.gate_proj", inner), ("mlp.up_proj", inner)], config.mlp_bias),
        down=single("mlp.down_proj", hidden, inner, config.mlp_bias),
    )


def take_embeddings(config: DecoderConfig, checkpoint: Checkpoint) -> Tensor:
    """The table [vocab_size, hidden_size], a view of the mapped file in its own type."""
    return checkpoint.take("model.embed_tokens.weight", (config.vocab_size, config.hidden_size))


def take_head(config: DecoderConfig, embeddings: Tensor, checkpoint: Checkpoint) -> Tensor:
    """The matrix [vocab_size, hidden_size] that makes logits, in the checkpoint's type."""
    shape = (config.vocab_size, config.hidden_size)
    if not config.tied_embeddings:
        return checkpoint.take("lm_head.weight", shape)
    if "lm_head.weight" in checkpoint:
        checkpoint.take("lm_head.weight", shape)
    return embeddings
