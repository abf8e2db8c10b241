"""An executor that computes nothing: tokens from arithmetic, time from a model of an accelerator.

Scheduler, KV cache and link are the real ones, so fleets can be tested without accelerators. It reads config.json
and generation_config.json (and the ids of special tokens, where tokenizer_config.json names them); no weights.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from services.engine.executor.interface import ModelDescription
from services.engine.grammars import TokenMasks
from services.engine.request import Request, RequestKey, SampledToken, ScheduledRequest, Step
from services.engine.settings import EngineSettings
from shared.block_hash import block_hash
from shared.model_source import (
    ModelSourceError,
    fingerprint,
    read_config,
    read_config_limits,
    read_json,
    resolve_model_folder,
)
from shared.protocol import ModelLimits, TokenLogprobs, pack_token_ids

_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Timing:
    """Milliseconds of a step: `base` + each prompt token + each decoding request + each token of KV read.

    The presets are an 8B model (32 layers, 8 KV heads of 128) in bf16 on one accelerator:
    - base: 16.06 GB of weights are read once a step, at 80% of the memory's bandwidth (H100 3.35 TB/s,
      H200 4.8 TB/s): 6.0 and 4.2 ms; 0.5 ms more for launches and the sampler.
    - prefill_token: 2 x 8.03e9 FLOP at half of 989 TFLOP/s (both): 0.0325 ms.
    - decode_request: compute hides behind the weights' reading; 0.004 ms of sampling and book-keeping a row.
    - kv_token: 131,072 bytes (2 x 32 x 8 x 128 x 2) at the same bandwidth: 4.9e-5 and 3.4e-5 ms.
    - kv_bytes: 90% of 80 and 141 GB, less the weights and 2 GB of activations.
    """

    base: float = 0.0
    prefill_token: float = 0.0
    decode_request: float = 0.0
    kv_token: float = 0.0
    kv_bytes: float = 108.8e9

    def milliseconds(self, step: Step) -> float:
        prefill = decodes = context = 0
        for scheduled in step.scheduled:
            if scheduled.num_tokens == 1:
                decodes += 1
            else:
                prefill += scheduled.num_tokens
            context += scheduled.start
        return self.base + self.prefill_token * prefill + self.decode_request * decodes + self.kv_token * context


KV_BYTES_PER_TOKEN = 131_072
TIMINGS = {
    "instant": Timing(),
    "h100": Timing(base=6.5, prefill_token=0.0325, decode_request=0.004, kv_token=4.9e-5, kv_bytes=53.9e9),
    "h200": Timing(base=4.7, prefill_token=0.0325, decode_request=0.004, kv_token=3.4e-5, kv_bytes=108.8e9),
}


class SimulatedExecutor:
    """Tokens are a pure function of the request's tokens and seed, so that a preempted, moved or resumed request
    goes on identically. `random` never gives a special or an eos token: lengths are exact. `echo` repeats the
    prompt, one token a step, and then gives eos; a prompt that itself holds an eos id ends there, unless
    ignore_eos is set. Both keep to a request's grammar, so that eos comes where nothing else may."""

    def __init__(self, settings: EngineSettings, sleep: Callable[[float], None] = time.sleep) -> None:
        folder = resolve_model_folder(settings.model, settings.revision, weights=False)
        limits = read_config_limits(folder)
        max_model_len = settings.max_model_len or limits.max_model_len
        if max_model_len > limits.max_model_len:
            raise ModelSourceError(
                f"--max-model-len {max_model_len} is over the model's own limit of {limits.max_model_len} tokens."
            )
        if settings.simulated_tokens == "echo" and not limits.eos_token_ids:
            raise ModelSourceError(f"--simulated-tokens echo ends with eos, and the configs in {folder} name no eos.")
        timing = TIMINGS[settings.simulated_accelerator]
        self._timing = timing if settings.simulated_step_ms is None else Timing(base=settings.simulated_step_ms)
        self._sleep = sleep
        self._echo = settings.simulated_tokens == "echo"
        self._eos = limits.eos_token_ids[0] if limits.eos_token_ids else 0
        self._avoided = _special_ids(folder) | set(limits.eos_token_ids)
        self._num_choices = _num_ordinary_ids(self._avoided, limits.vocab_size)
        self._num_blocks = settings.num_kv_blocks or max(
            1, int(timing.kv_bytes / KV_BYTES_PER_TOKEN / settings.block_size)
        )
        # The state of a request's sequence: how many of its tokens are mixed in, and the hash of those.
        self._states: dict[RequestKey, tuple[int, int]] = {}
        self._description = ModelDescription(
            name=settings.served_model_name[0] if settings.served_model_name else settings.model,
            # Never to be mixed with engines that run the real weights, nor with other simulated tokens.
            fingerprint=f"simulated-{settings.simulated_tokens}-{fingerprint(folder)}",
            limits=ModelLimits(max_model_len, limits.vocab_size, limits.eos_token_ids, settings.block_size),
            folder=folder,
        )

    @property
    def description(self) -> ModelDescription:
        return self._description

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    def execute(self, step: Step) -> list[SampledToken]:
        began = time.perf_counter()
        sampled = [self._sample(scheduled) for scheduled in step.scheduled]
        if step.token_masks is not None:
            self._choose_allowed(step, step.token_masks, sampled)
        step.sample_seconds = time.perf_counter() - began
        rest = self._timing.milliseconds(step) / 1000 - step.sample_seconds
        if rest > 0:
            self._sleep(rest)
        return sampled

    def take_memory(self) -> bool:
        return False

    def release(self, request: Request) -> None:
        self._states.pop(request.key, None)

    def close(self) -> None:
        self._states.clear()

    def _sample(self, scheduled: ScheduledRequest) -> SampledToken:
        request = scheduled.request
        sampling = request.sampling
        sampled = SampledToken()
        if sampling.prompt_logprobs is not None and scheduled.start < request.num_prompt_tokens - 1:
            end = min(scheduled.start + scheduled.num_tokens + 1, request.num_prompt_tokens)
            sampled.prompt_logprobs = [
                self._logprobs(token_id, position, sampling.prompt_logprobs)
                for position, token_id in enumerate(request.token_ids[scheduled.start + 1 : end], scheduled.start + 1)
            ]
        if scheduled.samples:
            sampled.token_id = token_id = self._next_echo(request) if self._echo else self._next_random(request)
            if sampling.logprobs is not None:
                sampled.logprobs = self._logprobs(token_id, len(request.token_ids), sampling.logprobs)
        return sampled

    def _choose_allowed(self, step: Step, masks: TokenMasks, sampled: list[SampledToken]) -> None:
        """Where a grammar forbids the token, another takes its place: a pure function of it, and of the grammar.
        The end is only chosen where nothing else may come."""
        rows = [row for row, scheduled in enumerate(step.scheduled) if scheduled.samples]
        for row, mask in zip(rows, masks.bitmask(rows), strict=True):
            request = step.scheduled[row].request
            token_id = sampled[row].token_id
            if request.grammar is None or token_id is None:
                continue
            # Behind the vocabulary there may be more bits, and a grammar's own eos.
            bits = np.unpackbits(mask.view(np.uint8), count=self._description.limits.vocab_size, bitorder="little")
            allowed = np.flatnonzero(bits)
            if np.any(allowed == token_id):
                continue
            if not len(allowed):
                sampled[row] = SampledToken(error="no token is left to choose from: the grammar excludes them all")
                continue
            ordinary = [int(other) for other in allowed if other not in self._avoided] or [int(x) for x in allowed]
            position = len(request.token_ids)
            token_id = ordinary[_mix(_mix(token_id) ^ position) % len(ordinary)]
            sampled[row].token_id = token_id
            if request.sampling.logprobs is not None:
                sampled[row].logprobs = self._logprobs(token_id, position, request.sampling.logprobs)

    def _next_echo(self, request: Request) -> int:
        position = request.num_output_tokens
        return request.token_ids[position] if position < request.num_prompt_tokens else self._eos

    def _next_random(self, request: Request) -> int:
        token_ids = request.token_ids
        num_mixed, state = self._states.get(request.key, (0, 0))
        if num_mixed == 0:
            num_mixed = request.num_prompt_tokens
            state = block_hash(request.sampling.seed, pack_token_ids(token_ids[:num_mixed]))
        for position in range(num_mixed, len(token_ids)):
            state = _mix(state ^ token_ids[position])
        self._states[request.key] = (len(token_ids), state)
        choice = _mix(state) % self._num_choices
        while choice in self._avoided:
            choice = (choice + 1) % self._num_choices
        return choice

    def _logprobs(self, token_id: int, position: int, num_top: int) -> TokenLogprobs:
        """The token is the likeliest; each alternative is half as likely as the one before."""
        logprob = -0.05 - _mix(token_id * 0x10001 + position) % 1000 / 2000
        vocab_size = self._description.limits.vocab_size
        num_top = min(num_top, vocab_size)
        return TokenLogprobs(
            token_id,
            logprob,
            1,
            [(token_id + rank) % vocab_size for rank in range(num_top)],
            [logprob if rank == 0 else -0.7 * (rank + 1) for rank in range(num_top)],
        )


def _mix(value: int) -> int:
    """One round of splitmix64."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _special_ids(folder: Path) -> set[int]:
    """Ids that stand for no text, as far as the small configs tell."""
    special: set[int] = set()
    config = read_config(folder)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = config.get(name)
        ids = cast("list[object]", value) if isinstance(value, list) else [value]
        special.update(token_id for token_id in ids if isinstance(token_id, int) and token_id >= 0)
    path = folder / "tokenizer_config.json"
    if path.is_file():
        added: Any = read_json(path).get("added_tokens_decoder")
        if isinstance(added, dict):
            for token_id, token in cast("dict[str, Any]", added).items():
                if token_id.isdecimal() and isinstance(token, dict) and cast("dict[str, Any]", token).get("special"):
                    special.add(int(token_id))
    return special


def _num_ordinary_ids(special: set[int], vocab_size: int) -> int:
    """Special tokens at the vocabulary's end are followed by rows that pad it: ordinary ids end before them."""
    at_the_end = [token_id for token_id in special if vocab_size // 2 < token_id < vocab_size]
    num_choices = min(at_the_end, default=vocab_size)
    if all(token_id in special for token_id in range(num_choices)):
        raise ModelSourceError(f"All {num_choices} token ids are special ones: there is nothing to simulate.")
    return num_choices
