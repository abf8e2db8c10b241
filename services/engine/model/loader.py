"""From a model's folder to a model that runs: which implementation, which type, and with which kernels."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from services.engine.model.attention import Attention, TorchAttention
from services.engine.model.batch import Batch
from services.engine.model.cpu_attention import KernelAttention, kernel_handles
from services.engine.model.cpu_decoder import CpuDecoder
from services.engine.model.cpu_decoder_ops import KernelDecoderOps
from services.engine.model.cuda_attention import VarlenAttention, varlen_handles
from services.engine.model.decoder import Decoder
from services.engine.model.decoder_config import NATIVE_MODEL_TYPES, native_decoder_config
from services.engine.model.decoder_ops import DecoderOps, TorchDecoderOps
from services.engine.model.errors import ModelLoadError
from services.engine.model.kernels import Kernels, load_kernels
from services.engine.model.kv_pool import KVLayer, KVPool
from services.engine.model.quantization import Quantization
from services.engine.model.weights import Checkpoint, weight_files

logger = logging.getLogger(__name__)

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class Model(Protocol):
    """Weights and their computation; the KV cache is the attention's."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def kv_layers(self) -> list[KVLayer]: ...

    def forward(self, batch: Batch, rows: Tensor, attention: Attention) -> Tensor:
        """The states [len(rows), …] of these rows, for `logits`; every token's keys and values go to the pool."""
        ...

    def logits(self, states: Tensor) -> Tensor:
        """The logits [rows, vocab_size] of some of these states. Apart, since those of a whole long prompt would
        take gigabytes."""
        ...


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """`make_attention` gives the fastest attention over a pool that handles this model. `brings_threads`: the model
    runs on as many threads of its own as PyTorch had when it was loaded, and PyTorch needs but one. `allowed_logits`
    takes states and their token mask (sampling/token_mask.py has its layout), where the model can leave out what it
    bans: that is minus infinity then, the rest as `logits` has it."""

    model: Model
    dtype: torch.dtype
    device: torch.device
    make_attention: Callable[[KVPool], Attention]
    brings_threads: bool
    allowed_logits: Callable[[Tensor, Tensor], Tensor] | None


def load_model(
    folder: Path,
    *,
    dtype: str = "auto",
    device: str = "auto",
    max_model_len: int,
    quantization: Quantization = "none",
    trust_remote_code: bool = False,
    use_kernels: bool = True,
) -> LoadedModel:
    """Load the model in `folder`. `use_kernels` False keeps to PyTorch's operations (tests compare the two).
    Raises ModelLoadError."""
    config = _hf_config(folder, trust_remote_code)
    torch_device = _device(device)
    torch_dtype = _dtype(dtype, config)
    kernels = load_kernels() if use_kernels and torch_device.type == "cpu" else None
    native = native_decoder_config(config)
    quantized = quantization != "none"
    if quantized:
        _check_quantizable(quantization, config.model_type, native is not None, torch_device, torch_dtype)
    if native is not None:
        usable = kernels
        if not kernel_handles(native.query_heads, native.kv_heads, native.head_dim, torch_dtype):
            usable = None
        model: Model
        if usable is not None and torch_dtype == torch.bfloat16 and (quantized or not _has_matrix_units()):
            model = CpuDecoder(
                native, config, Checkpoint(folder), usable, max_model_len=max_model_len, quantization=quantization
            )
        else:
            if quantized:
                logger.warning(
                    "Without the C kernels, weights are rounded to %s all the same, but save neither memory nor time.",
                    quantization,
                )
            ops: DecoderOps = TorchDecoderOps() if usable is None else KernelDecoderOps(usable, torch_dtype)
            model = Decoder(
                native,
                config,
                Checkpoint(folder),
                ops,
                dtype=torch_dtype,
                device=torch_device,
                max_model_len=max_model_len,
                quantization=quantization,
            )
        query_heads = native.query_heads
    else:
        from services.engine.model.transformers_model import TransformersModel

        weight_files(folder)
        logger.info("%s has no native decoder here: it runs on transformers' modules, slower.", config.model_type)
        model = TransformersModel(
            config, folder, dtype=torch_dtype, device=torch_device, trust_remote_code=trust_remote_code
        )
        query_heads = model.query_heads

    def make_attention(pool: KVPool) -> Attention:
        return _choose_attention(pool, model.kv_layers, query_heads, kernels, torch_dtype, torch_device)

    if isinstance(model, CpuDecoder):
        return LoadedModel(model, torch_dtype, torch_device, make_attention, True, model.allowed_logits)
    return LoadedModel(model, torch_dtype, torch_device, make_attention, False, None)


def _check_quantizable(
    quantization: Quantization, model_type: str, is_native: bool, device: torch.device, dtype: torch.dtype
) -> None:
    if device.type != "cpu":
        raise ModelLoadError(
            f"--quantization {quantization} works on CPUs only: leave it out on a GPU, or pass --device cpu."
        )
    if not is_native:
        raise ModelLoadError(
            f"--quantization {quantization} works only with what the native decoder covers of "
            f"{', '.join(NATIVE_MODEL_TYPES)} models: leave it out for this {model_type} model."
        )
    if dtype != torch.bfloat16:
        raise ModelLoadError(
            f"--quantization {quantization} works beside bfloat16 only, and this model would run in "
            f"{str(dtype).removeprefix('torch.')}: pass --dtype bfloat16."
        )


def _choose_attention(
    pool: KVPool,
    layers: list[KVLayer],
    query_heads: int,
    kernels: Kernels | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Attention:
    if kernels is not None and all(
        kernel_handles(query_heads, layer.kv_heads, layer.head_dim, dtype) for layer in layers
    ):
        return KernelAttention(pool, kernels)
    if device.type == "cuda" and all(varlen_handles(layer.head_dim, dtype, device) for layer in layers):
        return VarlenAttention(pool)
    return TorchAttention(pool)


def _has_matrix_units() -> bool:
    """Whether the processor has AMX, which oneDNN uses and the kernels here do not: prefills are faster there."""
    return bool(torch.cpu._is_amx_tile_supported())


def _hf_config(folder: Path, trust_remote_code: bool) -> Any:
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:  # a broken or unknown config fails in many ways
        reason = " ".join(str(error).split())
        raise ModelLoadError(f"The config.json in {folder} cannot be used: {reason[:300]}") from error
    quantization = getattr(config, "quantization_config", None)
    if quantization:
        method = quantization.get("quant_method", "?") if isinstance(quantization, dict) else "?"
        raise ModelLoadError(
            f"The model in {folder} is quantized ({method}), which is not supported: use its unquantized weights."
        )
    return config


def _device(device: str) -> torch.device:
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    elif device == "cuda" and not torch.cuda.is_available():
        raise ModelLoadError(
            "--device cuda was asked for, but PyTorch finds no GPU here (is its CUDA build installed?)."
        )
    return torch.device(device)


def _dtype(dtype: str, config: Any) -> torch.dtype:
    if dtype != "auto":
        return DTYPES[dtype]
    text_config = config.get_text_config(decoder=True)
    found = getattr(text_config, "dtype", None) or getattr(config, "dtype", None)
    return DTYPES.get(str(found).removeprefix("torch."), torch.float32)
