"""Runs a real model with PyTorch: loads it, owns the KV pool's memory, and computes the steps the scheduler chooses.

Everything of the model is in services/engine/model, everything of choosing a token in services/engine/sampling.
"""

import logging
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from services.engine.executor.interface import ModelDescription
from services.engine.executor.step_clock import StepClock
from services.engine.grammars import TokenMasks
from services.engine.model.batch import Batch, build_batch
from services.engine.model.cpu_threads import usable_threads
from services.engine.model.errors import ModelLoadError
from services.engine.model.kv_budget import size_kv_cache
from services.engine.model.kv_pool import KVPool, block_bytes
from services.engine.model.loader import LoadedModel, load_model
from services.engine.request import Request, RequestKey, SampledToken, ScheduledRequest, Step
from services.engine.settings import EngineSettings
from shared.model_source import fingerprint, read_config_limits, resolve_model_folder
from shared.protocol import ModelLimits, TokenLogprobs

logger = logging.getLogger(__name__)

# Logits of so many prompt positions are in memory together: 150 MB at a vocabulary of 151,936, in float32.
SCORED_ROWS_AT_ONCE = 256


class TokenSampler(Protocol):
    """What the executor asks of the sampler (services/engine/sampling/sampler.py)."""

    def sample(
        self, logits: Tensor, requests: Sequence[Request], token_bitmask: Tensor | None = None
    ) -> list[SampledToken]: ...

    def prompt_logprobs(self, logits: Tensor, next_token_ids: list[int], count: int) -> list[TokenLogprobs]: ...

    def release(self, key: RequestKey) -> None: ...


class TorchExecutor:
    """The executor of executor/interface.py. Raises ModelSourceError (ModelLoadError is one) where the model cannot
    be found, or not be served as configured.

    `sampler` is the engine's own unless a test brings another; `use_kernels` False keeps model and sampler to
    PyTorch's operations.
    """

    def __init__(
        self, settings: EngineSettings, *, sampler: TokenSampler | None = None, use_kernels: bool = True
    ) -> None:
        folder = resolve_model_folder(settings.model, settings.revision, code=settings.trust_remote_code)
        limits = read_config_limits(folder)
        max_model_len = settings.max_model_len or limits.max_model_len
        if max_model_len > limits.max_model_len:
            raise ModelLoadError(
                f"--max-model-len {max_model_len} is more than the model's own limit of {limits.max_model_len} tokens."
            )
        torch.set_num_threads(settings.threads or usable_threads())
        loaded = load_model(
            folder,
            dtype=settings.dtype,
            device=settings.device,
            max_model_len=max_model_len,
            quantization=settings.quantization,
            trust_remote_code=settings.trust_remote_code,
            use_kernels=use_kernels,
        )
        self._loaded: LoadedModel | None = loaded
        threads = torch.get_num_threads()
        if loaded.brings_threads:
            # PyTorch's own threads go on spinning for milliseconds after each of its operations, on the cores that the
            # model's threads need by then.
            torch.set_num_threads(1)
        num_blocks, max_model_len = size_kv_cache(loaded, settings, max_model_len)
        self._pool = KVPool(
            loaded.model.kv_layers,
            num_blocks=num_blocks,
            block_size=settings.block_size,
            dtype=loaded.dtype,
            device=loaded.device,
        )
        self._attention = loaded.make_attention(self._pool)
        self._device = loaded.device
        self._clock = StepClock(loaded.device)
        self._vocab_size = loaded.model.vocab_size
        self._sampler = sampler or _make_sampler(settings, loaded, limits.eos_token_ids, threads, use_kernels)
        dtype = str(loaded.dtype).removeprefix("torch.")
        rounding = [] if settings.quantization == "none" else [settings.quantization]
        self.description = ModelDescription(
            name=settings.served_model_name[0] if settings.served_model_name else settings.model,
            # Weights of another type or rounding make other tokens: no stream may go on from one to the other.
            fingerprint="-".join([fingerprint(folder), dtype, *rounding]),
            limits=ModelLimits(
                max_model_len=max_model_len,
                vocab_size=loaded.model.vocab_size,
                eos_token_ids=limits.eos_token_ids,
                block_size=settings.block_size,
                max_waiting_requests=settings.max_waiting_requests,
            ),
            folder=folder,
            device=loaded.device.type,
        )
        logger.info(
            "Model %s loaded: %s%s on %s, %s; KV cache of %d blocks (%d tokens, %.2f GiB); %d threads.",
            settings.model,
            dtype,
            "" if settings.quantization == "none" else f" with {settings.quantization} weights",
            loaded.device,
            type(self._attention).__name__,
            num_blocks,
            num_blocks * settings.block_size,
            num_blocks * block_bytes(loaded.model.kv_layers, settings.block_size, loaded.dtype) / 2**30,
            threads,
        )

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def loaded(self) -> LoadedModel:
        """The model, for benchmarks. Raises RuntimeError once the executor is closed."""
        if self._loaded is None:
            raise RuntimeError("The executor is closed.")
        return self._loaded

    @torch.inference_mode()
    def execute(self, step: Step) -> list[SampledToken]:
        results = [SampledToken() for _ in step.scheduled]
        shares = list(enumerate(step.scheduled))
        if not shares:
            return results
        batch = self._build_batch(step.scheduled)
        low, high = batch.token_id_range
        if low < 0 or high >= self._vocab_size:
            # Checked before a request is queued; should one come through, it must not take the others down.
            shares = self._set_invalid_aside(shares, results)
            if not shares:
                return results
            batch = self._build_batch([share for _, share in shares])
        self._run(shares, batch, results, step.token_masks)
        step.sample_seconds = self._clock.sample_seconds()
        return results

    def take_memory(self) -> bool:
        return self._pool.take_memory()

    def release(self, request: Request) -> None:
        self._sampler.release(request.key)

    def close(self) -> None:
        self._loaded = None
        self._pool.close()

    def _build_batch(self, scheduled: Sequence[ScheduledRequest]) -> Batch:
        return build_batch(
            scheduled, block_size=self._pool.block_size, num_blocks=self._pool.num_blocks, device=self._device
        )

    def _set_invalid_aside(
        self, shares: list[tuple[int, ScheduledRequest]], results: list[SampledToken]
    ) -> list[tuple[int, ScheduledRequest]]:
        valid: list[tuple[int, ScheduledRequest]] = []
        for i, share in shares:
            token_ids = share.request.token_ids[share.start : share.start + share.num_tokens]
            outside = next((x for x in token_ids if not 0 <= x < self._vocab_size), None)
            if outside is None:
                valid.append((i, share))
            else:
                results[i].error = f"token id {outside} is outside the vocabulary (0 to {self._vocab_size - 1})"
        return valid

    def _run(
        self,
        shares: list[tuple[int, ScheduledRequest]],
        batch: Batch,
        results: list[SampledToken],
        masks: TokenMasks | None,
    ) -> None:
        sampling: list[tuple[int, Request]] = []
        scoring: list[tuple[int, Request, int, int]] = []  # result, request, first position, number of positions
        rows: list[int] = []
        prompt_rows: list[int] = []
        row = 0
        for i, share in shares:
            if share.samples:
                sampling.append((i, share.request))
                rows.append(row + share.num_tokens - 1)
            if (count := _scored_positions(share)) > 0:
                scoring.append((i, share.request, share.start, count))
                prompt_rows += range(row, row + count)
            row += share.num_tokens
        row_indices = torch.tensor(rows + prompt_rows, dtype=torch.int64, device=self._device)
        model = self.loaded.model
        self._clock.forward_begins()
        states = model.forward(batch, row_indices, self._attention)

        if sampling:
            requests = [request for _, request in sampling]
            logits, bitmask = self._logits(states[: len(rows)], [i for i, _ in sampling], requests, masks)
            self._clock.sampling_begins()
            tokens = self._sampler.sample(logits, requests, bitmask)
            self._clock.sampling_ends()
            for (i, _), token in zip(sampling, tokens, strict=True):
                results[i] = token
        at = len(rows)
        for i, request, start, count in scoring:
            next_ids = request.token_ids[start + 1 : start + 1 + count]
            try:
                results[i].prompt_logprobs = self._score(states[at : at + count], next_ids, request)
            except ValueError as error:  # NaN in this request's logits
                results[i] = SampledToken(error=str(error))
            at += count

    def _logits(
        self, states: Tensor, places: Sequence[int], requests: Sequence[Request], masks: TokenMasks | None
    ) -> tuple[Tensor, Tensor | None]:
        """The logits of the step's requests at these places, and the mask that is still to be applied to them."""
        loaded = self.loaded
        if masks is None or loaded.allowed_logits is None:
            logits = loaded.model.logits(states)
            # The masks were filled while the model ran.
            bitmask = None if masks is None else torch.from_numpy(masks.bitmask(places))
            return logits, None if bitmask is None else bitmask.to(self._device, non_blocking=True)
        bitmask = torch.from_numpy(masks.bitmask(places))
        # Logprobs are of all tokens, whatever may be drawn.
        whole = [row for row, request in enumerate(requests) if request.sampling.logprobs is not None]
        if not whole:
            return loaded.allowed_logits(states, bitmask), None
        wanted = bitmask.clone()
        wanted[whole] = -1
        return loaded.allowed_logits(states, wanted), bitmask

    def _score(self, states: Tensor, next_ids: list[int], request: Request) -> list[TokenLogprobs]:
        logprobs: list[TokenLogprobs] = []
        for first in range(0, len(next_ids), SCORED_ROWS_AT_ONCE):
            part = slice(first, first + SCORED_ROWS_AT_ONCE)
            logits = self.loaded.model.logits(states[part])
            logprobs += self._sampler.prompt_logprobs(logits, next_ids[part], request.sampling.prompt_logprobs or 0)
        return logprobs


def _scored_positions(share: ScheduledRequest) -> int:
    """How many of the share's leading tokens are followed by a prompt token whose logprob the client asked for. Once
    there is output, the prompt's logprobs have been sent (a preempted or resumed request computes it again)."""
    request = share.request
    if request.sampling.prompt_logprobs is None or request.num_output_tokens > 0:
        return 0
    return min(share.num_tokens, request.num_prompt_tokens - 1 - share.start)


def _make_sampler(
    settings: EngineSettings, loaded: LoadedModel, eos_token_ids: list[int], threads: int, use_kernels: bool
) -> TokenSampler:
    from services.engine.sampling.processors import ProcessorContext, load_logits_processors
    from services.engine.sampling.sampler import Sampler

    context = ProcessorContext(loaded.model.vocab_size, tuple(eos_token_ids), loaded.device)
    return Sampler(
        vocab_size=loaded.model.vocab_size,
        eos_token_ids=eos_token_ids,
        device=loaded.device,
        logprobs_mode=settings.logprobs_mode,
        processors=load_logits_processors(context),
        threads=threads,
        use_kernels=use_kernels,
    )
