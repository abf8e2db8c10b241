"""The native decoder of the Llama family, over a flat batch of tokens and the paged KV cache.

Built from a config and safetensors. On a CPU in bf16, cpu_decoder.py does the same in one call of C.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from services.engine.model.attention import Attention, AttentionOptions
from services.engine.model.batch import MIN_ROWS, Batch
from services.engine.model.decoder_config import DecoderConfig
from services.engine.model.decoder_ops import DecoderOps, Heads
from services.engine.model.decoder_weights import LayerWeights, Matrix, take_embeddings, take_head, take_layer
from services.engine.model.kv_pool import KVLayer
from services.engine.model.linear import Linear, make_linear
from services.engine.model.quantization import FORMATS, Formats, Quantization, WeightFormat, rounded_weights
from services.engine.model.rope import rope_tables
from services.engine.model.weights import Checkpoint


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: Tensor
    qkv: Linear
    heads: Heads
    options: AttentionOptions
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


class Decoder:
    """`hf_config` is read for the rotary embedding only. Quantized weights take the room that they had before."""

    def __init__(
        self,
        config: DecoderConfig,
        hf_config: Any,
        checkpoint: Checkpoint,
        ops: DecoderOps,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_model_len: int,
        quantization: Quantization = "none",
    ) -> None:
        self.config = config
        self.vocab_size = config.vocab_size
        self.kv_layers = [KVLayer(config.kv_heads, config.head_dim)] * config.num_layers
        self._ops = ops
        self._dtype = dtype
        self._cos, self._sin = rope_tables(hf_config, config.head_dim, max_model_len, device)

        def take(name: str, *shape: int) -> Tensor:
            return checkpoint.take(name, shape).to(device, dtype)

        table = take_embeddings(config, checkpoint)
        # The packed head is a second copy of a tied table. On a CPU the table stays in the mapped file, in its own
        # type, so that only the rows that are looked up cost memory.
        self._embeddings = table if device.type == "cpu" else table.to(device, dtype)
        formats = FORMATS[quantization]
        self._layers = [_make_layer(config, i, take_layer(config, i, take), formats) for i in range(config.num_layers)]
        self._norm = take("model.norm.weight", config.hidden_size)
        head = take_head(config, table, checkpoint)
        head = self._embeddings if head is table and device.type != "cpu" else head.to(device, dtype)
        self._head = make_linear(rounded_weights(head, formats.head))
        checkpoint.finish()

    def forward(self, batch: Batch, rows: Tensor, attention: Attention) -> Tensor:
        """The states [len(rows), hidden_size] of these rows; every token's keys and values go to the pool."""
        config, ops = self.config, self._ops
        epsilon = config.rms_norm_epsilon
        residual = functional.embedding(batch.token_ids, self._embeddings).to(self._dtype)
        delta: Tensor | None = None
        for i, layer in enumerate(self._layers):
            if delta is None:
                x = ops.rms_norm(residual, layer.attention_norm, epsilon)
            else:
                x = ops.add_rms_norm(delta, residual, layer.attention_norm, epsilon)
            qkv = layer.qkv(x)
            query = ops.rotate_and_store(qkv, layer.heads, epsilon, self._cos, self._sin, batch, attention.pool, i)
            x = attention.attend(query, i, batch, layer.options)
            x = ops.add_rms_norm(layer.output(x.flatten(1)), residual, layer.mlp_norm, epsilon)
            delta = layer.down(ops.silu_and_multiply(layer.gate_up(x)))
        assert delta is not None
        return ops.add_rms_norm(delta[rows], residual[rows], self._norm, epsilon)

    def logits(self, states: Tensor) -> Tensor:
        """[rows, hidden_size] -> [rows, vocab_size]."""
        if len(states) == 0:
            return states.new_empty(0, self.vocab_size)
        padded = states if len(states) >= MIN_ROWS else states.repeat(MIN_ROWS, 1)
        return self._head(padded.contiguous())[: len(states)]


def _make_layer(config: DecoderConfig, i: int, weights: LayerWeights, formats: Formats) -> _Layer:
    def linear(matrix: Matrix, format_: WeightFormat) -> Linear:
        return make_linear(rounded_weights(matrix.weight, format_), matrix.bias)

    return _Layer(
        attention_norm=weights.attention_norm,
        qkv=linear(weights.qkv, formats.attention),
        heads=Heads(
            query=config.query_heads,
            kv=config.kv_heads,
            dim=config.head_dim,
            query_norm=weights.query_norm,
            key_norm=weights.key_norm,
        ),
        options=AttentionOptions(scale=config.head_dim**-0.5, window=config.windows[i]),
        output=linear(weights.output, formats.attention),
        mlp_norm=weights.mlp_norm,
        gate_up=linear(weights.gate_up, formats.mlp),
        down=linear(weights.down, formats.mlp),
    )
