"""Decides what each step computes: one token budget, shared by decodes and chunks of prompts.

There are no phases. A request has `num_computed_tokens` and `len(token_ids)`, and a step brings some requests
closer; chunked prefill, prefix hits, preempted and resumed requests are all that. `core` carries the steps out.
"""

import itertools
import time
from bisect import bisect_left, insort
from operator import attrgetter

from services.engine.kv_cache import KVCache
from services.engine.request import Request, RequestStatus, ScheduledRequest, Step
from services.engine.statistics import Statistics

# Where as many tokens wait as fill so many of the largest steps, those who wait count more than those who read.
BACKLOG_STEPS = 8

_order = attrgetter("order")


class Scheduler:
    """Waiting and running requests, ordered by priority, then by arrival.

    A request is admitted with room for all its known tokens, so that only a decode can run out of blocks; then
    the youngest of the lowest priority gives up its blocks and waits again. `max_num_seqs` never exceeds the
    budget, so that every decode runs in every step, however long the prompts beside it are.

    `usual_step_tokens` is the budget where little waits: smaller steps keep streams smooth beside a prompt, larger ones
    bring many prompts sooner to their first tokens.
    """

    def __init__(
        self,
        kv_cache: KVCache,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_waiting_requests: int,
        statistics: Statistics | None = None,
        usual_step_tokens: int | None = None,
    ) -> None:
        self.kv_cache = kv_cache
        self._statistics = Statistics() if statistics is None else statistics
        self.max_num_batched_tokens = max_num_batched_tokens
        self.usual_step_tokens = usual_step_tokens or max_num_batched_tokens
        self.max_num_seqs = min(max_num_seqs, self.usual_step_tokens)
        self.max_waiting_requests = max_waiting_requests
        self.waiting: list[Request] = []
        self.running: dict[Request, None] = {}
        self._arrivals = itertools.count()
        self._preempted: list[Request] = []
        self._prefilling: list[Request] = []
        self._waiting_tokens = 0

    @property
    def is_full(self) -> bool:
        """Whether the waiting queue takes no more. Preempted requests count, but always find their place."""
        return len(self.waiting) >= self.max_waiting_requests

    @property
    def is_prefilling(self) -> bool:
        """Whether the last step may have computed more than one token of some request."""
        return bool(self._prefilling)

    @property
    def uncomputed_tokens(self) -> int:
        """Known tokens that no step has computed yet, but for those of running decodes."""
        return self._waiting_tokens + sum(
            len(request.token_ids) - request.num_computed_tokens
            for request in self._prefilling
            if request.status is RequestStatus.RUNNING
        )

    def refusal(self, request: Request) -> str | None:
        """Why this request could never run, however long it waits."""
        # The last token is sampled and never computed.
        most = max(len(request.token_ids), request.max_total_tokens - 1)
        needed = self.kv_cache.blocks_for(most)
        if needed <= self.kv_cache.num_blocks:
            return None
        return (
            f"the request may grow to {most} tokens, which take {needed} KV blocks; the engine has "
            f"{self.kv_cache.num_blocks}: shorten the prompt or lower max_tokens"
        )

    def add(self, request: Request) -> None:
        """Queue a request that `refusal` has nothing against."""
        request.arrival_index = next(self._arrivals)
        request.status = RequestStatus.WAITING
        self._enqueue(request)

    def schedule(self) -> Step:
        """Choose the next step's work, admitting and preempting as needed."""
        scheduled, prefills = self._schedule_decodes()
        if prefills or self.waiting:
            self._schedule_prefills(scheduled, prefills)
        self._prefilling = prefills
        return Step(scheduled)

    def take_preempted(self) -> list[Request]:
        """Those preempted since the last call."""
        preempted, self._preempted = self._preempted, []
        return preempted

    def finish(self, request: Request) -> bool:
        """Take a request out, whatever its state, and free its blocks. False: it was out already."""
        if request.status is RequestStatus.FINISHED:
            return False
        if request.status is RequestStatus.WAITING:
            self._dequeue(request)
        elif request.status is RequestStatus.RUNNING:
            del self.running[request]
            self.kv_cache.release(request)
        request.status = RequestStatus.FINISHED
        return True

    def _schedule_decodes(self) -> tuple[list[ScheduledRequest], list[Request]]:
        scheduled: list[ScheduledRequest] = []
        prefills: list[Request] = []
        extend = self.kv_cache.extend
        block_size = self.kv_cache.block_size
        num_preempted = len(self._preempted)
        for request in list(self.running):
            if request.status is not RequestStatus.RUNNING:
                continue  # preempted a moment ago
            computed = request.num_computed_tokens
            if len(request.token_ids) - computed > 1:
                prefills.append(request)
                continue
            if len(request.block_table) * block_size <= computed:
                while not extend(request):
                    victim = max(self.running, key=_order)
                    self._preempt(victim)
                    if victim is request:
                        break
                if request.status is not RequestStatus.RUNNING:
                    continue
            scheduled.append(ScheduledRequest(request, computed, 1))
        if len(self._preempted) > num_preempted:
            scheduled = [entry for entry in scheduled if entry.request.status is RequestStatus.RUNNING]
            prefills = [request for request in prefills if request.status is RequestStatus.RUNNING]
        return scheduled, prefills

    def _schedule_prefills(self, scheduled: list[ScheduledRequest], prefills: list[Request]) -> None:
        """Spend what the decodes left of the budget, in order, on running prompts and on waiting requests."""
        has_backlog = self.uncomputed_tokens >= BACKLOG_STEPS * self.max_num_batched_tokens
        budget = (self.max_num_batched_tokens if has_backlog else self.usual_step_tokens) - len(scheduled)
        # What was just taken from somebody is not handed to somebody else in the same step.
        may_admit = not self._preempted
        prefills.sort(key=_order)
        continued = iter(list(prefills))
        request = next(continued, None)
        while budget > 0:
            head = self.waiting[0] if may_admit and self.waiting else None
            if head is not None and (request is None or head.order < request.order):
                if not self._admit(head):
                    may_admit = False
                    continue
                budget -= self._schedule_chunk(scheduled, head, budget)
                prefills.append(head)
            elif request is not None:
                budget -= self._schedule_chunk(scheduled, request, budget)
                request = next(continued, None)
            else:
                return

    @staticmethod
    def _schedule_chunk(scheduled: list[ScheduledRequest], request: Request, budget: int) -> int:
        start = request.num_computed_tokens
        num_tokens = min(budget, len(request.token_ids) - start)
        scheduled.append(ScheduledRequest(request, start, num_tokens))
        return num_tokens

    def _admit(self, request: Request) -> bool:
        if len(self.running) >= self.max_num_seqs:
            return False
        # A block for each running request stays free, or the next decodes would preempt again at once.
        if not self.kv_cache.admit(request, reserve=len(self.running)):
            return False
        self._dequeue(request)
        request.status = RequestStatus.RUNNING
        self.running[request] = None
        statistics = self._statistics
        if self.kv_cache.shares(request):
            statistics.prefix_queried_tokens += len(request.token_ids)
            statistics.prefix_hit_tokens += request.num_computed_tokens
        if request.num_cached_tokens is None:
            request.admitted_at = time.perf_counter()
            statistics.queue_seconds.observe(request.admitted_at - request.queued_at)
            request.num_cached_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
        return True

    def _preempt(self, request: Request) -> None:
        del self.running[request]
        self.kv_cache.release(request)
        request.status = RequestStatus.WAITING
        request.num_preemptions += 1
        if request.prompt_logprobs is not None:
            request.prompt_logprobs = []
        self._preempted.append(request)
        self._enqueue(request)

    def _enqueue(self, request: Request) -> None:
        insort(self.waiting, request, key=_order)
        self._waiting_tokens += len(request.token_ids)

    def _dequeue(self, request: Request) -> None:
        del self.waiting[bisect_left(self.waiting, request.order, key=_order)]
        self._waiting_tokens -= len(request.token_ids)
