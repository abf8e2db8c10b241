"""What the native decoder must know of a model, taken from its Hugging Face config.

One decoder serves the Llama family: Llama (SmolLM2 too), Mistral, Qwen2 and Qwen3 differ in biases, head norms and
windows only. What is not covered here runs on transformers' own modules (transformers_model.py).
"""

from dataclasses import dataclass
from typing import Any

from services.engine.model.rope import SUPPORTED_TYPES, rope_parameters

NATIVE_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Sizes are in elements. `windows` has one entry a layer: see AttentionOptions."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    rms_norm_epsilon: float
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    head_norms: bool
    tied_embeddings: bool
    windows: tuple[int | None, ...]


def native_decoder_config(config: Any) -> DecoderConfig | None:
    """None where the native decoder does not cover the model. `config` is a transformers config."""
    if config.model_type not in NATIVE_MODEL_TYPES or config.hidden_act not in ("silu", "swish"):
        return None
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope = rope_parameters(config)
    if head_dim % 2 or rope["rope_type"] not in SUPPORTED_TYPES or rope.get("partial_rotary_factor", 1.0) != 1.0:
        return None
    attention_bias = bool(getattr(config, "attention_bias", False))
    return DecoderConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        query_heads=config.num_attention_heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        head_dim=head_dim,
        rms_norm_epsilon=config.rms_norm_eps,
        qkv_bias=attention_bias or config.model_type == "qwen2",
        output_bias=attention_bias,
        mlp_bias=bool(getattr(config, "mlp_bias", False)),
        head_norms=config.model_type == "qwen3",
        tied_embeddings=bool(config.tie_word_embeddings),
        windows=_windows(config),
    )


def _windows(config: Any) -> tuple[int | None, ...]:
    window = getattr(config, "sliding_window", None)
    if config.model_type == "mistral":
        return (window,) * config.num_hidden_layers
    layer_types = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)
