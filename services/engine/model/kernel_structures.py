"""The structures of the C kernels, field by field: `Attention` in paged_attention.h, `Linear` in packed_linear.h,
`Layer` and `Step` in decoder_step.c."""

import ctypes

_POINTER, _INTEGER, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class AttentionArguments(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("query", "keys", "values", "out")),
        *((name, _POINTER) for name in ("query_starts", "context_lens", "block_tables", "item_starts")),
        *((name, _INTEGER) for name in ("sequences", "table_width", "block_size")),
        *((name, _INTEGER) for name in ("q_heads", "kv_heads", "head_dim", "window")),
        *((name, _FLOAT) for name in ("scale", "soft_cap")),
        ("interleaved", _INTEGER),
    )


class LinearArguments(ctypes.Structure):
    _fields_ = (
        ("weights", _POINTER),
        ("bias", _POINTER),
        *((name, _INTEGER) for name in ("inputs", "outputs", "panels", "format")),
    )


class LayerArguments(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("attention_norm", "query_norm", "key_norm", "mlp_norm")),
        *((name, LinearArguments) for name in ("qkv", "output", "gate_up", "down")),
        *((name, _POINTER) for name in ("keys", "values")),
        ("window", _INTEGER),
    )


class StepArguments(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("layers", "norm", "cos", "sin")),
        *((name, _INTEGER) for name in ("num_layers", "hidden")),
        ("epsilon", _FLOAT),
        *((name, _POINTER) for name in ("positions", "slots")),
        ("rows", _INTEGER),
        ("selected", _POINTER),
        ("num_selected", _INTEGER),
        *((name, _POINTER) for name in ("residual", "normed", "qkv", "query", "attended", "activated")),
        *((name, _POINTER) for name in ("selected_residual", "out")),
        ("attention", AttentionArguments),
    )
