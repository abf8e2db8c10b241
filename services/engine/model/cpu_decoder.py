"""The native decoder on a CPU in bf16, with weights of 16, 8 or 4 bits: a whole step in one call of C
(kernels/decoder_step.c).

`decoder` is the same operation by operation, for GPUs, other types, and CPUs without a C compiler.
"""

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from services.engine.model.attention import Attention
from services.engine.model.batch import Batch
from services.engine.model.decoder_config import DecoderConfig
from services.engine.model.decoder_weights import LayerWeights, Matrix, take_embeddings, take_head, take_layer
from services.engine.model.kernel_structures import AttentionArguments, LayerArguments, LinearArguments, StepArguments
from services.engine.model.kernels import Kernels
from services.engine.model.kv_pool import KVLayer, KVPool
from services.engine.model.packed_weights import MatrixPlan, PackedWeights
from services.engine.model.quantization import FORMATS, Quantization
from services.engine.model.rope import rope_tables
from services.engine.model.weights import Checkpoint

DTYPE = torch.bfloat16


class CpuDecoder:
    """A request's states and logits are the same bits alone and in any company, chunked or whole.

    `attention` in `forward` says where the pool is; the attention itself is in the step. `hf_config` is read for the
    rotary embedding only.
    """

    def __init__(
        self,
        config: DecoderConfig,
        hf_config: Any,
        checkpoint: Checkpoint,
        kernels: Kernels,
        *,
        max_model_len: int,
        quantization: Quantization = "none",
    ) -> None:
        self.config = config
        self.vocab_size = config.vocab_size
        self.kv_layers = [KVLayer(config.kv_heads, config.head_dim)] * config.num_layers
        self._threads = torch.get_num_threads()
        self._step: Callable[..., None] = kernels.long.decoder_step
        self._step.argtypes, self._step.restype = [ctypes.POINTER(StepArguments), ctypes.c_int64], None
        self._product: Callable[..., None] = kernels.long.linear_float
        self._product.argtypes = [ctypes.POINTER(LinearArguments), *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 2]
        self._product.restype = None
        self._allowed_product: Callable[..., None] = kernels.long.allowed_linear_float
        self._allowed_product.argtypes = [
            ctypes.POINTER(LinearArguments),
            *[ctypes.c_void_p] * 3,
            *[ctypes.c_int64] * 3,
        ]
        self._allowed_product.restype = None
        self._can_interleave: Callable[[int, int], int] = kernels.long.can_interleave
        kernels.long.can_interleave.argtypes = [ctypes.c_int64, ctypes.c_int64]
        self._cos, self._sin = rope_tables(hf_config, config.head_dim, max_model_len, torch.device("cpu"))

        def take(name: str, *shape: int) -> Tensor:
            return checkpoint.take(name, shape).to(DTYPE)

        self._packed = PackedWeights(kernels, _plan_matrices(config, quantization))
        self._kept: list[Tensor] = []  # what the structures point to
        # In a mapped file of its own: only the rows that are looked up cost memory, and none of what is packed here.
        self._embeddings = take_embeddings(config, checkpoint.reopened())
        table = take_embeddings(config, checkpoint)
        self._layers = (LayerArguments * config.num_layers)()
        for i in range(config.num_layers):
            self._layers[i] = self._pack_layer(take_layer(config, i, take), config.windows[i])
        self._norm = take("model.norm.weight", config.hidden_size).clone()
        self._head = self._pack(Matrix(take_head(config, table, checkpoint).to(DTYPE), None))
        checkpoint.finish()
        self._pool: KVPool | None = None
        self._rows = 0
        self._arguments = StepArguments()
        self._fill_arguments()

    @property
    def weight_bytes(self) -> int:
        """Bytes that a step of one token reads."""
        return self._packed.num_bytes

    def forward(self, batch: Batch, rows: Tensor, attention: Attention) -> Tensor:
        """The states [len(rows), hidden_size] of these rows; every token's keys and values go to the pool."""
        if attention.pool is not self._pool:
            self._point_to_pool(attention.pool)
        num_rows, selected = batch.num_tokens, len(rows)
        embeddings = functional.embedding(batch.token_ids[:num_rows], self._embeddings)
        residual = embeddings.to(DTYPE).contiguous()
        out = torch.empty(selected, self.config.hidden_size, dtype=DTYPE)
        if max(num_rows, selected) > self._rows:
            self._make_scratch(max(num_rows, selected))
        sequences, table_width = batch.block_tables.shape
        item_starts = torch.empty(sequences + 1, dtype=torch.int64)
        step = self._arguments
        step.positions, step.slots, step.rows = batch.positions.data_ptr(), batch.slots.data_ptr(), num_rows
        step.selected, step.num_selected = rows.data_ptr(), selected
        step.residual, step.out = residual.data_ptr(), out.data_ptr()
        paged = step.attention
        paged.query_starts = batch.query_starts.data_ptr()
        paged.context_lens = batch.context_lens.data_ptr()
        paged.block_tables = batch.block_tables.data_ptr()
        paged.item_starts = item_starts.data_ptr()
        paged.sequences, paged.table_width = sequences, table_width
        self._step(step, self._threads)
        return out

    def logits(self, states: Tensor) -> Tensor:
        """[rows, hidden_size] -> [rows, vocab_size], float32."""
        states = states.contiguous()
        out = torch.empty(len(states), self.vocab_size)
        self._product(self._head, states.data_ptr(), out.data_ptr(), len(states), self._threads)
        return out

    def allowed_logits(self, states: Tensor, bitmask: Tensor) -> Tensor:
        """`logits`, to the bit, of what a token mask (see sampling/token_mask.py) allows. What it bans is not computed,
        and minus infinity."""
        states, bitmask = states.contiguous(), bitmask.contiguous()
        out = torch.empty(len(states), self.vocab_size)
        pointers = states.data_ptr(), bitmask.data_ptr(), out.data_ptr()
        self._allowed_product(self._head, *pointers, *bitmask.shape, self._threads)
        return out

    def _pack_layer(self, weights: LayerWeights, window: int | None) -> LayerArguments:
        return LayerArguments(
            self._keep(weights.attention_norm),
            self._keep(weights.query_norm),
            self._keep(weights.key_norm),
            self._keep(weights.mlp_norm),
            self._pack(weights.qkv),
            self._pack(weights.output),
            self._pack(weights.gate_up),
            self._pack(weights.down),
            window=window or 0,
        )

    def _pack(self, matrix: Matrix) -> LinearArguments:
        linear = self._packed.add(matrix.weight)
        linear.bias = self._keep(matrix.bias)
        return linear

    def _keep(self, tensor: Tensor | None) -> int | None:
        """The address of a copy that lives as long as this, and keeps no mapped file."""
        if tensor is None:
            return None
        self._kept.append(tensor.clone(memory_format=torch.contiguous_format))
        return self._kept[-1].data_ptr()

    def _fill_arguments(self) -> None:
        config, step = self.config, self._arguments
        step.layers = ctypes.addressof(self._layers)
        step.norm = self._norm.data_ptr()
        step.cos, step.sin = self._cos.data_ptr(), self._sin.data_ptr()
        step.num_layers, step.hidden = config.num_layers, config.hidden_size
        step.epsilon = config.rms_norm_epsilon
        paged: AttentionArguments = step.attention
        paged.q_heads, paged.kv_heads, paged.head_dim = config.query_heads, config.kv_heads, config.head_dim
        paged.scale = config.head_dim**-0.5

    def _point_to_pool(self, pool: KVPool) -> None:
        for layer, keys, values in zip(self._layers, pool.keys, pool.values, strict=True):
            layer.keys, layer.values = keys.data_ptr(), values.data_ptr()
        paged: AttentionArguments = self._arguments.attention
        paged.block_size = pool.block_size
        # Nobody else reads or writes this model's pool, so that it may lie as suits the processor.
        paged.interleaved = self._can_interleave(self.config.head_dim, pool.block_size)
        self._pool = pool

    def _make_scratch(self, rows: int) -> None:
        """Room for what a step computes on its way; it stays as large as the largest step so far."""
        config, step = self.config, self._arguments
        query = config.query_heads * config.head_dim
        sizes = {
            "normed": config.hidden_size,
            "qkv": query + 2 * config.kv_heads * config.head_dim,
            "query": query,
            "attended": query,
            "activated": config.intermediate_size,
            "selected_residual": config.hidden_size,
        }
        self._scratch = {name: torch.empty(rows, size, dtype=DTYPE) for name, size in sizes.items()}
        for name, tensor in self._scratch.items():
            setattr(step, name, tensor.data_ptr())
        step.attention.query, step.attention.out = step.query, step.attended
        self._rows = rows


def _plan_matrices(config: DecoderConfig, quantization: Quantization) -> list[MatrixPlan]:
    """Every matrix in the order of a step."""
    hidden, inner = config.hidden_size, config.intermediate_size
    query, kv = config.query_heads * config.head_dim, config.kv_heads * config.head_dim
    formats = FORMATS[quantization]
    layer = [
        MatrixPlan(query + 2 * kv, hidden, format=formats.attention),
        MatrixPlan(hidden, query, format=formats.attention),
        MatrixPlan(2 * inner, hidden, gated=True, format=formats.mlp),
        MatrixPlan(hidden, inner, format=formats.mlp),
    ]
    return [*layer * config.num_layers, MatrixPlan(config.vocab_size, hidden, format=formats.head)]
