"""The engine without its threads and sockets: requests in, steps, outputs by frontend out.

`scheduler` chooses, an executor computes, `results` says what came of it, and this book-keeps. `loop` drives it from
one thread; tests drive it directly.
"""

import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from services.engine.admission import InvalidRequest, already_ended, make_request
from services.engine.deadlines import Deadlines
from services.engine.executor.interface import Executor
from services.engine.grammars import GrammarCompiler, MaskFiller, PendingGrammars, TokenMasks
from services.engine.kv_cache import BlockEvents, KVCache
from services.engine.request import Request, SampledToken, Step
from services.engine.results import RequestFailed, add_what_comes_once, next_output
from services.engine.scheduler import Scheduler
from services.engine.settings import EngineSettings
from services.engine.statistics import Statistics, TokenRate
from services.engine.timelines import Timelines
from shared.protocol import Add, FinishReason, Load, ModelLimits, Quarantined, RequestOutput
from shared.quarantine import Quarantine, prompt_fingerprint
from shared.vocabulary import VocabularyError

logger = logging.getLogger(__name__)

MAX_ERROR_LENGTH = 1000
FULL_CHECK_INTERVAL = 10.0

OutputsByPeer = dict[bytes, list[RequestOutput]]


class InvariantError(Exception):
    """The engine's accounts are wrong: a bug. It must not go on, since outputs might be wrong too."""


class EngineCore:
    """Every method belongs to one thread. An exception out of `step` or `check_when_idle` is the engine's end."""

    def __init__(self, executor: Executor, settings: EngineSettings, clock: Callable[[], float] = time.time) -> None:
        self.executor = executor
        self.description = executor.description
        self.statistics = Statistics()
        self.timelines = Timelines()
        self.draining = False
        limits = self.description.limits
        self._kv_cache = KVCache(executor.num_blocks, limits.block_size, settings.enable_prefix_caching)
        self.limits = ModelLimits(
            # A request must fit into the cache alone, or it could never end.
            max_model_len=min(limits.max_model_len, executor.num_blocks * limits.block_size),
            vocab_size=limits.vocab_size,
            eos_token_ids=limits.eos_token_ids,
            block_size=limits.block_size,
            max_waiting_requests=settings.max_waiting_requests,
        )
        budget = settings.step_budget(executor.description.device)
        self.scheduler = Scheduler(
            self._kv_cache,
            settings.max_num_seqs,
            budget.most,
            settings.max_waiting_requests,
            self.statistics,
            usual_step_tokens=budget.usual,
        )
        self._clock = clock
        self._eos_ids = frozenset(limits.eos_token_ids)
        self.pending_grammars = PendingGrammars(
            GrammarCompiler(self._model_folder, limits.vocab_size, limits.eos_token_ids)
        )
        self._mask_filler = MaskFiller(limits.vocab_size, limits.eos_token_ids, settings.threads)
        self._requests: dict[bytes, dict[int, Request]] = {}
        self._outputs: OutputsByPeer = {}
        self._deadlines = Deadlines()
        self._quarantine = Quarantine()
        self._rate = TokenRate()
        self._last_full_check = -FULL_CHECK_INTERVAL

    @property
    def num_requests(self) -> int:
        return len(self.scheduler.running) + len(self.scheduler.waiting) + len(self.pending_grammars)

    @property
    def num_blocks(self) -> int:
        return self._kv_cache.num_blocks

    @property
    def num_free_blocks(self) -> int:
        return self._kv_cache.num_free

    @property
    def num_cached_blocks(self) -> int:
        """Blocks, used or free, whose content can be shared."""
        return self._kv_cache.pool.num_stored

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        scheduler = self.scheduler
        pending = self.pending_grammars
        return bool(
            scheduler.running
            or scheduler.waiting
            or self._outputs
            or pending.any_ready
            or (pending and self._deadlines.any_due(self._clock()))
        )

    def add(self, peer: bytes, add: Add) -> None:
        """Take a request of a frontend. Whatever is wrong with it comes back as that request's output."""
        if add.request_id in self._requests.get(peer, ()):
            logger.warning("frontend %s sent ADD for request %d twice: ignored", peer.hex(), add.request_id)
            return
        self.statistics.received += 1
        if self.draining:
            self.statistics.refuse("draining")
            self._answer(peer, add.request_id, FinishReason.HANDED_OVER)
            return
        refused_for = self._quarantine and self._quarantine.seconds_left(prompt_fingerprint(add.prompt_token_ids))
        if refused_for:
            self.statistics.refuse("quarantined")
            error = (
                f"engines died again and again under this very prompt: it is refused for another {refused_for:.0f} s"
            )
            self._answer(peer, add.request_id, FinishReason.ERROR, error=error)
            return
        try:
            request = make_request(peer, add, self.limits, self._eos_ids)
        except InvalidRequest as error:
            self.statistics.refuse("invalid")
            self._answer(peer, add.request_id, FinishReason.ERROR, error=str(error))
            return
        ended = already_ended(request)
        if ended is not None:
            self._answer(peer, add.request_id, ended.reason, stop_token_id=ended.stop_token_id)
            return
        refusal = self.scheduler.refusal(request)
        if refusal is not None:
            self.statistics.refuse("invalid")
            self._answer(peer, add.request_id, FinishReason.ERROR, error=refusal)
            return
        if self.scheduler.is_full or len(self.pending_grammars) >= self.scheduler.max_waiting_requests:
            self.statistics.refuse("overloaded")
            self._answer(peer, add.request_id, FinishReason.OVERLOADED)
            return
        request.queued_at = time.perf_counter()
        if request.trace_context:
            self.timelines.begin(request, len(self.scheduler.waiting))
        self._deadlines.add(request)
        self._requests.setdefault(peer, {})[add.request_id] = request
        # Where nothing is generated, nothing needs a grammar.
        if request.sampling.structured_output is not None and len(request.token_ids) < request.max_total_tokens:
            self.pending_grammars.add(request)
            self._queue_ready()  # a grammar that is known needs no thread
        else:
            self.scheduler.add(request)

    def set_quarantined(self, quarantined: Iterable[Quarantined]) -> None:
        """Refuse these prompts for as long as a frontend says."""
        for each in quarantined:
            self._quarantine.set(each.fingerprint, each.seconds)

    def abort(self, peer: bytes, request_ids: Iterable[int]) -> None:
        """Stop working for these and say nothing more of them. Unknown ids are ignored."""
        requests = self._requests.get(peer)
        if requests is None:
            return
        for request_id in request_ids:
            request = requests.get(request_id)
            if request is not None:
                self._finish(request, FinishReason.ABORT)

    def abort_peer(self, peer: bytes) -> None:
        """A frontend is gone: stop working for it."""
        self.abort(peer, list(self._requests.get(peer, ())))
        self._outputs.pop(peer, None)

    def hand_over(self, waiting_only: bool = False) -> None:
        """Tell the frontends that others must go on with all requests, or with those that wait."""
        running = [] if waiting_only else list(self.scheduler.running)
        for request in [*self.pending_grammars.requests, *self.scheduler.waiting, *running]:
            self._finish(request, FinishReason.HANDED_OVER)
            self._answer(request.key.peer, request.key.request_id, FinishReason.HANDED_OVER)

    def step(self) -> OutputsByPeer:
        """Run one step, and return what it and everything since the last one brought, by frontend."""
        times = self.statistics.last_step
        for request in self._deadlines.take_due(self._clock()):
            self._finish(request, FinishReason.ABORT)
            self._answer(request.key.peer, request.key.request_id, FinishReason.ABORT)
        self._queue_ready()
        began = time.perf_counter()
        step = self.scheduler.schedule()
        preempted = self.scheduler.take_preempted()
        for request in preempted:
            self.executor.release(request)
            self.statistics.preemptions += 1
        scheduled = time.perf_counter()
        times.schedule = scheduled - began
        if step.scheduled:
            if self.timelines:
                self.timelines.step_begins()
            step.token_masks = self._start_masks(step)
            sampled = self.executor.execute(step)
            if step.token_masks is not None:
                step.token_masks.wait()
            executed = time.perf_counter()
            times.execute = executed - scheduled
            times.sample = step.sample_seconds
            # Decodes are a token each.
            num_tokens = step.num_tokens if self.scheduler.is_prefilling else len(step.scheduled)
            if len(sampled) != len(step.scheduled):
                raise InvariantError(f"the executor answered {len(sampled)} of {len(step.scheduled)} requests")
            self._take_results(step, sampled)
            if self.timelines:
                self.timelines.step_ends()
            times.bookkeeping = time.perf_counter() - executed
            self.statistics.add_step(len(step.scheduled), num_tokens)
        elif self.num_requests > len(self.pending_grammars) and not preempted:
            raise InvariantError(f"{len(self.scheduler.waiting)} requests wait, and none of them can ever run")
        outputs, self._outputs = self._outputs, {}
        return outputs

    def load(self) -> Load:
        """How busy the engine is now."""
        scheduler = self.scheduler
        return Load(
            running_requests=len(scheduler.running),
            waiting_requests=len(scheduler.waiting) + len(self.pending_grammars),
            waiting_tokens=scheduler.uncomputed_tokens,
            free_blocks=self._kv_cache.num_free,
            total_blocks=self._kv_cache.num_blocks,
            tokens_per_second=self._rate.update(time.monotonic(), self.statistics.generated_tokens),
        )

    def take_block_events(self) -> BlockEvents:
        """Blocks stored and evicted since the last call."""
        pool = self._kv_cache.pool
        events = pool.events
        if events:
            pool.events = BlockEvents()
        return events

    def stored_block_hashes(self) -> list[int]:
        """Everything that the prefix cache holds now, for a frontend that has just come."""
        return self._kv_cache.pool.stored_hashes()

    def check_when_idle(self) -> None:
        """Raise InvariantError or BlockAccountError if anything is left when no request is. Counts are compared
        every time, each block only every ten seconds."""
        if self.num_requests or self._requests or self.timelines:
            raise InvariantError(f"requests are left when none should be: {self._requests}")
        if self._kv_cache.num_free != self._kv_cache.num_blocks:
            lost = self._kv_cache.num_blocks - self._kv_cache.num_free
            raise InvariantError(f"{lost} KV blocks are in use when no request is there")
        now = time.monotonic()
        if now - self._last_full_check >= FULL_CHECK_INTERVAL:
            self._last_full_check = now
            self.check()

    def check(self) -> None:
        """Compare all accounts of blocks with the running requests. For tests and idle moments: it takes long."""
        self._kv_cache.check(self.scheduler.running)
        known = {request for requests in self._requests.values() for request in requests.values()}
        if known != {*self.scheduler.running, *self.scheduler.waiting, *self.pending_grammars.requests}:
            raise InvariantError("the scheduler's requests are not those that the engine knows")

    def close(self) -> None:
        self.pending_grammars.close()
        self._mask_filler.close()
        self.executor.close()

    def _model_folder(self) -> Path:
        if self.description.folder is None:
            raise VocabularyError("this engine's executor has no model folder to read a vocabulary from")
        return self.description.folder

    def _queue_ready(self) -> None:
        """Queue the requests whose grammar has been made."""
        for request, error in self.pending_grammars.take_ready():
            if error is not None:
                self._fail(request, error)
            elif request.grammar is not None and request.grammar.done:
                # It was complete already; the engine that made it could not say so.
                self._finish(request, FinishReason.STOP)
                self._answer(request.key.peer, request.key.request_id, FinishReason.STOP)
            else:
                self.scheduler.add(request)

    def _start_masks(self, step: Step) -> TokenMasks | None:
        rows = [row for row, scheduled in enumerate(step.scheduled) if scheduled.samples]
        matchers = [step.scheduled[row].request.grammar for row in rows]
        if not any(matchers):
            return None
        return self._mask_filler.start(rows, matchers)

    def _take_results(self, step: Step, sampled: list[SampledToken]) -> None:
        block_size = self._kv_cache.block_size
        outputs = self._outputs
        num_generated = 0
        for scheduled, result in zip(step.scheduled, sampled, strict=True):
            request = scheduled.request
            token_ids = request.token_ids
            computed = scheduled.start + scheduled.num_tokens
            request.num_computed_tokens = computed
            grammar = request.grammar
            error = result.error or (None if grammar is None else grammar.error)
            if error is not None:
                # Its blocks are not shared: what the failed step left in them is unknown.
                self._fail(request, error)
                continue
            if computed // block_size > request.num_stored_blocks:
                self._kv_cache.store_computed(request)
            if request.prompt_logprobs is not None and result.prompt_logprobs:
                request.prompt_logprobs.extend(result.prompt_logprobs)
            if computed < len(token_ids):
                continue
            try:
                output = next_output(request, result, self._eos_ids)
                num_generated += len(output.token_ids)
                if not request.has_output:
                    self._count_first_output(request)
                    add_what_comes_once(request, output)
            except RequestFailed as failure:
                self._fail(request, str(failure))
                continue
            if output.finish_reason is not None:
                self._finish(request, output.finish_reason)
            peer = request.key.peer
            if peer in outputs:
                outputs[peer].append(output)
            else:
                outputs[peer] = [output]
        self.statistics.generated_tokens += num_generated

    def _count_first_output(self, request: Request) -> None:
        request.has_output = True
        statistics = self.statistics
        statistics.prefill_seconds.observe(time.perf_counter() - request.admitted_at)
        statistics.prompt_tokens += request.num_prompt_tokens
        statistics.cached_tokens += request.num_cached_tokens or 0

    def _fail(self, request: Request, error: str) -> None:
        logger.error("request %d of frontend %s failed: %s", request.key.request_id, request.key.peer.hex(), error)
        self._finish(request, FinishReason.ERROR)
        self._answer(request.key.peer, request.key.request_id, FinishReason.ERROR, error=error)

    def _finish(self, request: Request, reason: FinishReason) -> None:
        if not self.scheduler.finish(request):
            return
        self.pending_grammars.discard(request)
        request.finish_reason = reason
        if request.trace_context:
            self.timelines.end(request)
        finished = self.statistics.finished
        finished[reason.name.lower()] = finished.get(reason.name.lower(), 0) + 1
        self.executor.release(request)
        requests = self._requests[request.key.peer]
        del requests[request.key.request_id]
        if not requests:
            del self._requests[request.key.peer]

    def _answer(
        self,
        peer: bytes,
        request_id: int,
        reason: FinishReason,
        error: str | None = None,
        stop_token_id: int | None = None,
    ) -> None:
        """An output that ends a request without a token."""
        output = RequestOutput(request_id, finish_reason=reason, stop_token_id=stop_token_id)
        if error is not None:
            output.error = error[:MAX_ERROR_LENGTH]
        self._outputs.setdefault(peer, []).append(output)
