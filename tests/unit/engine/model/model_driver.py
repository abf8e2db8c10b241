"""Drives a TorchExecutor through requests without the engine's scheduler: blocks in random order, optional chunks,
shared prefixes and preemption. Its sampler takes the likeliest token and keeps every logit that it saw."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from services.engine.executor.torch_executor import TorchExecutor
from services.engine.request import Request, RequestKey, SampledToken, ScheduledRequest, Step
from services.engine.settings import EngineSettings
from shared.protocol import TokenLogprobs
from shared.sampling_params import SamplingParams


class RecordingSampler:
    """`logits[request id][position]` are those that followed the token at this position."""

    def __init__(self) -> None:
        self.logits: dict[int, dict[int, torch.Tensor]] = {}
        self.released: list[RequestKey] = []
        self._scored: list[torch.Tensor] = []

    def sample(
        self, logits: torch.Tensor, requests: Sequence[Request], token_bitmask: torch.Tensor | None = None
    ) -> list[SampledToken]:
        for row, request in zip(logits.clone(), requests, strict=True):
            self.logits.setdefault(request.key.request_id, {})[request.num_tokens - 1] = row
        return [SampledToken(token_id=token_id) for token_id in logits.float().argmax(-1).tolist()]

    def prompt_logprobs(self, logits: torch.Tensor, next_token_ids: list[int], count: int) -> list[TokenLogprobs]:
        assert len(logits) == len(next_token_ids)
        logprobs = logits.float().log_softmax(-1)
        self._scored.append(logits.clone())
        return [
            TokenLogprobs(token_id, logprobs[i, token_id].item(), 1 + count)
            for i, token_id in enumerate(next_token_ids)
        ]

    def take_scored(self) -> list[torch.Tensor]:
        scored, self._scored = self._scored, []
        return scored

    def release(self, key: RequestKey) -> None:
        self.released.append(key)


def make_executor(
    folder: Path, sampler: RecordingSampler | None = None, *, use_kernels: bool = True, **settings: Any
) -> TorchExecutor:
    defaults: dict[str, Any] = {
        "model": str(folder),
        "dtype": "float32",
        "device": "cpu",
        "threads": 1,
        "block_size": 4,
        "num_kv_blocks": 256,
    }
    return TorchExecutor(
        EngineSettings(**(defaults | settings)), sampler=sampler or RecordingSampler(), use_kernels=use_kernels
    )


@dataclass
class Driver:
    executor: TorchExecutor
    budget: int = 1 << 30  # tokens a step
    share_prefixes: bool = False
    preempt_every: int = 0  # steps after which the youngest running request loses its blocks
    seed: int = 0
    _known_blocks: dict[tuple[int, ...], int] = field(default_factory=dict)

    def run(self, prompts: Sequence[list[int]], max_tokens: int, *, score_prompts: bool = False) -> list[list[int]]:
        """The output tokens of all prompts, which run together. Nothing ends before max_tokens."""
        executor = self.executor
        block_size = executor.description.limits.block_size
        free = list(range(executor.num_blocks))
        random.Random(self.seed).shuffle(free)
        sampling = SamplingParams(max_tokens=max_tokens, prompt_logprobs=0 if score_prompts else None)
        requests = [
            Request(RequestKey(b"test", i), list(prompt), len(prompt), sampling) for i, prompt in enumerate(prompts)
        ]
        step_number = 0
        while running := [r for r in requests if r.num_output_tokens < max_tokens]:
            step_number += 1
            if self.preempt_every and step_number % self.preempt_every == 0:
                youngest = max(running, key=lambda r: r.key.request_id)
                free = youngest.block_table + free if not self.share_prefixes else free
                youngest.block_table, youngest.num_computed_tokens = [], 0
            left = self.budget
            scheduled: list[ScheduledRequest] = []
            # Decodes first, as the scheduler promises.
            for request in sorted(running, key=lambda r: r.num_tokens - r.num_computed_tokens > 1):
                if self.share_prefixes and not request.block_table:
                    self._take_known_blocks(request, block_size)
                count = min(left, request.num_tokens - request.num_computed_tokens)
                if count == 0:
                    continue
                left -= count
                end = request.num_computed_tokens + count
                while len(request.block_table) * block_size < end:
                    request.block_table.append(free.pop())
                scheduled.append(ScheduledRequest(request, request.num_computed_tokens, count))
            self._finish_step(scheduled, executor.execute(Step(scheduled)), block_size)
        for request in requests:
            executor.release(request)
        return [r.token_ids[r.num_prompt_tokens :] for r in requests]

    def _finish_step(self, scheduled: list[ScheduledRequest], results: list[SampledToken], block_size: int) -> None:
        sampler: Any = self.executor._sampler
        scored = sampler.take_scored()
        for share, result in zip(scheduled, results, strict=True):
            request = share.request
            samples = share.samples
            request.num_computed_tokens = share.start + share.num_tokens
            if result.prompt_logprobs is not None:
                for offset, row in enumerate(scored.pop(0)):
                    sampler.logits.setdefault(request.key.request_id, {})[share.start + offset] = row
            for i in range(request.num_computed_tokens // block_size):
                prefix = tuple(request.token_ids[: (i + 1) * block_size])
                self._known_blocks.setdefault(prefix, request.block_table[i])
            assert result.error is None
            assert (result.token_id is not None) == samples
            if result.token_id is not None:
                request.token_ids.append(result.token_id)

    def _take_known_blocks(self, request: Request, block_size: int) -> None:
        while (end := (len(request.block_table) + 1) * block_size) < request.num_tokens:
            block = self._known_blocks.get(tuple(request.token_ids[:end]))
            if block is None:
                break
            request.block_table.append(block)
            request.num_computed_tokens = end
