"""How many KV blocks the memory holds, and whether one request of the longest allowed length fits into them."""

import gc
import logging

import torch

from services.engine.model.batch import build_batch
from services.engine.model.errors import ModelLoadError
from services.engine.model.kv_pool import KVPool, block_bytes
from services.engine.model.loader import LoadedModel
from services.engine.request import Request, RequestKey, ScheduledRequest
from services.engine.settings import EngineSettings
from shared.sampling_params import SamplingParams

GIB = 1024**3


logger = logging.getLogger(__name__)


def size_kv_cache(loaded: LoadedModel, settings: EngineSettings, max_model_len: int) -> tuple[int, int]:
    """The pool's blocks by the settings, and the length that a request may have: `max_model_len`, or what fits where
    the settings leave that open. Raises ModelLoadError where they ask for a length that does not fit."""
    size = block_bytes(loaded.model.kv_layers, settings.block_size, loaded.dtype)
    needed = -(-max_model_len // settings.block_size)
    if settings.num_kv_blocks is not None:
        blocks = settings.num_kv_blocks
        remedy = f"raise --num-kv-blocks from {blocks} to at least {needed}"
    elif loaded.device.type == "cuda":
        blocks = _free_gpu_bytes(loaded, settings) // size
        remedy = f"raise --gpu-memory-utilization (now {settings.gpu_memory_utilization:g})"
    else:
        blocks = int(settings.kv_cache_memory * GIB) // size
        remedy = f"raise --kv-cache-memory from {settings.kv_cache_memory:g} to at least {needed * size / GIB:.3g} GiB"
    if blocks >= needed:
        return blocks, max_model_len
    held = max(blocks, 0) * settings.block_size
    if held == 0:
        raise ModelLoadError(f"There is no memory for a KV cache; one request needs {needed} blocks: {remedy}.")
    if settings.max_model_len is not None:
        raise ModelLoadError(
            f"The KV cache would hold {held} tokens, but one request may have {max_model_len}: lower --max-model-len "
            f"to {held} or less, or {remedy}."
        )
    logger.warning(
        "The KV cache holds %d tokens, so a request may have no more, though the model itself allows %d: for longer "
        "ones, %s.",
        held,
        max_model_len,
        remedy,
    )
    return blocks, held


def _free_gpu_bytes(loaded: LoadedModel, settings: EngineSettings) -> int:
    """What is left of the allowed share of the GPU's memory beside the weights and the largest step's activations,
    measured by running such a step."""
    device = loaded.device
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    _run_largest_step(loaded, settings)
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    of_others = total - free - torch.cuda.memory_reserved(device)
    return int(total * settings.gpu_memory_utilization) - peak - of_others


@torch.inference_mode()
def _run_largest_step(loaded: LoadedModel, settings: EngineSettings) -> None:
    budget = settings.step_budget(loaded.device.type).most
    sequences = min(settings.max_num_seqs, budget)
    length = -(-budget // sequences)
    blocks = list(range(-(-length // settings.block_size)))
    pool = KVPool(
        loaded.model.kv_layers,
        num_blocks=len(blocks),
        block_size=settings.block_size,
        dtype=loaded.dtype,
        device=loaded.device,
    )
    scheduled = []
    for i in range(sequences):
        request = Request(RequestKey(b"profile", i), [0] * length, length, SamplingParams(), block_table=blocks)
        scheduled.append(ScheduledRequest(request, 0, length))
    batch = build_batch(scheduled, block_size=settings.block_size, num_blocks=pool.num_blocks, device=loaded.device)
    rows = batch.query_starts[1:].long() - 1
    states = loaded.model.forward(batch, rows, loaded.make_attention(pool))
    # The sampler works in float32.
    loaded.model.logits(states).float()
