"""Architectures without a native decoder: transformers' own modules, with our paged attention as their attention.

The flat batch goes in as one row of tokens with its position ids; transformers makes no mask for an attention
function that it does not know, and keeps no cache. A probe at loading learns each layer's shape, and refuses what
this attention would not compute right.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM

from services.engine.model.attention import Attention, AttentionOptions
from services.engine.model.batch import MIN_ROWS, Batch
from services.engine.model.errors import ModelLoadError
from services.engine.model.kv_pool import KVLayer
from services.engine.model.linear import pack_linear_modules

ATTENTION_NAME = "tandem_paged"
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
# Tensors that models hand to every attention function and that a paged one has no use for.
_HARMLESS_TENSORS = ("position_ids", "cache_position")


@dataclass(slots=True)
class _Probe:
    """Learns the attention layers from one run of the model; `refusal` is why it cannot be served."""

    layers: dict[int, KVLayer] = field(default_factory=dict)
    query_heads: int = 0
    refusal: str | None = None


@dataclass(frozen=True, slots=True)
class _Paged:
    batch: Batch
    attention: Attention


_running: ContextVar[_Probe | _Paged | None] = ContextVar("tandem_paged_attention", default=None)


@contextmanager
def _run_with(state: _Probe | _Paged) -> Iterator[None]:
    token = _running.set(state)
    try:
        yield
    finally:
        _running.reset(token)


def _paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: [1, heads, rows, head_dim] -> [1, rows, heads, head_dim]."""
    state = _running.get()
    if state is None:
        raise RuntimeError(f"The attention {ATTENTION_NAME!r} runs inside TransformersModel.forward only.")
    if isinstance(state, _Probe):
        state.refusal = state.refusal or _refusal(module, key, value, attention_mask, kwargs)
        state.layers[getattr(module, "layer_idx", -1)] = KVLayer(key.shape[1], key.shape[3])
        state.query_heads = max(state.query_heads, query.shape[1])
        return torch.zeros_like(query).transpose(1, 2), None
    batch, attention = state.batch, state.attention
    layer: int = module.layer_idx  # pyright: ignore[reportAssignmentType]
    # Some modules hand over float32 where the weights are bf16; the kernels read the pool's type.
    dtype = attention.pool.keys[layer].dtype
    keys, values = (x[0, :, : batch.num_tokens].transpose(0, 1).to(dtype) for x in (key, value))
    attention.pool.write(layer, keys, values, batch.slots)
    options = AttentionOptions(
        scale=query.shape[3] ** -0.5 if scaling is None else float(scaling), window=sliding_window, soft_cap=softcap
    )
    rows = query[0].transpose(0, 1).to(dtype).contiguous()
    return attention.attend(rows, layer, batch, options)[None].to(query.dtype), None


def _refusal(
    module: nn.Module, key: Tensor, value: Tensor, attention_mask: Tensor | None, kwargs: dict[str, Any]
) -> str | None:
    if not isinstance(getattr(module, "layer_idx", None), int):
        return "its attention layers have no number"
    if attention_mask is not None:
        return "it makes an attention mask of its own"
    if kwargs.get("is_causal") is False or not getattr(module, "is_causal", True):
        return "its attention is not causal"
    if key.shape != value.shape:
        return "its keys and values differ in size"
    extra = [name for name, x in kwargs.items() if isinstance(x, Tensor) and name not in _HARMLESS_TENSORS]
    if extra:
        return f"its attention takes {extra[0]}"
    return None


AttentionInterface.register(ATTENTION_NAME, _paged_attention)


class TransformersModel:
    """Raises ModelLoadError where the architecture cannot be served right, saying why."""

    def __init__(
        self, config: Any, folder: Path, *, dtype: torch.dtype, device: torch.device, trust_remote_code: bool
    ) -> None:
        text_config = config.get_text_config(decoder=True)
        for rope_type in _rope_types(getattr(text_config, "rope_parameters", None)):
            if rope_type in _LENGTH_DEPENDENT_ROPE:
                raise ModelLoadError(
                    f"The model's rope_type {rope_type!r} changes with the length of a sequence, which batches of "
                    "different lengths do not allow: set another in the rope_parameters of its config.json."
                )
        self._model = _load(config, folder, dtype, trust_remote_code).to(device)
        pack_linear_modules(self._model)
        self._device = device
        self.vocab_size: int = text_config.vocab_size
        probe = self._probe()
        self.kv_layers = self._checked_layers(probe, text_config)
        self.query_heads = probe.query_heads

    def forward(self, batch: Batch, rows: Tensor, attention: Attention) -> Tensor:
        """The logits [len(rows), vocab_size] of these rows already: what a model does to its head's output (Gemma 2
        squashes it) is inside its own forward. Every token's keys and values go to the pool."""
        wanted = rows if len(rows) else rows.new_zeros(1)
        padded = wanted if len(wanted) >= MIN_ROWS else wanted.expand(MIN_ROWS)
        with _run_with(_Paged(batch, attention)):
            logits = self._run(batch.token_ids, batch.positions, padded)
        return logits[: len(rows)]

    def logits(self, states: Tensor) -> Tensor:
        return states

    def _run(self, token_ids: Tensor, positions: Tensor, rows: Tensor) -> Tensor:
        logits: Tensor = self._model(
            input_ids=token_ids[None], position_ids=positions[None], use_cache=False, logits_to_keep=rows
        ).logits[0]
        # Models of a time before logits_to_keep give every row's.
        return logits if len(logits) == len(rows) or len(rows) > len(logits) else logits[rows]

    def _probe(self) -> _Probe:
        probe = _Probe()
        rows = torch.arange(MIN_ROWS, device=self._device)
        try:
            with _run_with(probe), torch.inference_mode():
                self._run(torch.zeros_like(rows), rows, rows)
        except Exception as error:  # remote and rarely used modules fail in their own ways
            raise ModelLoadError(
                f"{type(self._model).__name__} does not run on a flat batch of tokens, so it cannot be served: "
                f"{type(error).__name__}: {str(error).split(chr(10))[0]}"
            ) from error
        return probe

    def _checked_layers(self, probe: _Probe, text_config: Any) -> list[KVLayer]:
        refusal = probe.refusal
        if refusal is None and sorted(probe.layers) != list(range(text_config.num_hidden_layers)):
            refusal = "some of its layers keep another state than keys and values"
        if refusal is None and getattr(text_config, "num_kv_shared_layers", 0):
            refusal = "its layers share keys and values"
        if refusal is not None:
            raise ModelLoadError(f"{type(self._model).__name__} cannot be served with a paged KV cache: {refusal}.")
        return [probe.layers[i] for i in range(len(probe.layers))]


def _load(config: Any, folder: Path, dtype: torch.dtype, trust_remote_code: bool) -> nn.Module:
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
            local_files_only=True,
            output_loading_info=True,
        )
        model, report = loaded
    except Exception as error:  # transformers raises many kinds, often over many lines
        reason = " ".join(str(error).split())
        raise ModelLoadError(f"transformers cannot load the model in {folder}: {reason[:300]}") from error
    for kind, text in (
        ("missing_keys", "lacks the tensor"),
        ("mismatched_keys", "has another shape than its config.json asks for in the tensor"),
        ("unexpected_keys", "has, with no place for it in the model, the tensor"),
    ):
        if names := sorted(str(name) for name in report.get(kind) or ()):
            more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            raise ModelLoadError(f"The checkpoint in {folder} {text} {names[0]}{more}.")
    return model.eval()


def _rope_types(parameters: Any) -> Iterator[str]:
    """Every rope_type in the (for some models nested, by kind of layer) rope parameters."""
    if isinstance(parameters, dict):
        for name, value in parameters.items():
            if name in ("rope_type", "type") and isinstance(value, str):
                yield value
            else:
                yield from _rope_types(value)
