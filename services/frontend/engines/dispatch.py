"""Every request in flight, and which engine has it: sends it, moves it on when its engine cannot, gives it up.

`pool` says which engines take requests; `connection` carries them, and tells here when it cannot any more.
"""

import logging
import time
from collections.abc import Callable, Iterable, Sequence

from services.frontend.engines.connection import EngineConnection
from services.frontend.engines.connection_state import ConnectionState
from services.frontend.engines.counts import DispatchCounts
from services.frontend.engines.in_flight import InFlight
from services.frontend.engines.routing import RoutingPolicy
from services.frontend.engines.trials import Trials
from services.frontend.generation import Generation, GenerationError, new_request_id
from shared.protocol import FinishReason, Quarantined, RequestOutput, pack_token_ids
from shared.quarantine import Quarantine, prompt_fingerprint

logger = logging.getLogger(__name__)

# Seconds after which a client may try again.
RETRY_WHEN_OVERLOADED = 1.0
RETRY_WHEN_NO_ENGINE = 5.0


class Dispatcher:
    """The requests of one pool. Each is with one engine, or waits for one, until its sink is done or failed."""

    def __init__(
        self,
        model: str,
        policy: RoutingPolicy,
        max_requests: int,
        max_failovers: int,
        no_engine_timeout: float,
        quarantine_time: float,
        clock: Callable[[], float],
    ) -> None:
        self.engines: list[EngineConnection] = []  # those that take requests now; the pool replaces the list
        self.requests: dict[int, InFlight] = {}
        self.counts = DispatchCounts()
        self._model = model
        self._policy = policy
        self._max_requests = max_requests
        self._max_failovers = max_failovers
        self._no_engine_timeout = no_engine_timeout
        self._clock = clock
        self._waiting: dict[int, InFlight] = {}
        self.quarantine = Quarantine(clock)
        self._quarantine_time = quarantine_time
        self._trials = Trials(max_failovers, on_end=self.place_waiting)

    @property
    def num_waiting(self) -> int:
        """Requests that no engine has."""
        return len(self._waiting)

    def submit(self, generation: Generation) -> None:
        """Send it to an engine. Raises GenerationError: 503 when none takes requests, 429 past the limit."""
        if generation.request_id in self.requests:
            raise ValueError(f"request {generation.request_id} is already in flight")
        if not self.engines:
            raise self._no_engine()
        if len(self.requests) >= self._max_requests:
            raise GenerationError(
                f"this server already has {self._max_requests} requests in flight; try again in a moment",
                429,
                RETRY_WHEN_OVERLOADED,
                reason="server_limit",
            )
        if self.quarantine:
            self._refuse_quarantined(generation)
        request = InFlight(generation)
        if not self._place(request, self.engines):
            raise self._no_engine()
        self.requests[generation.request_id] = request
        self.counts.requests += 1

    def abort(self, request_id: int) -> None:
        """Forget the request, wherever it is, and have its engine stop. Its sink hears nothing more."""
        request = self.requests.pop(request_id, None)
        if request is None:
            return
        self._waiting.pop(request_id, None)
        if request.connection is not None:
            request.connection.abort(request)
        request.attempt_ended("aborted")
        self._trials.end(request)

    def finished(self, request: InFlight) -> None:
        request.attempt_ended("finished")
        request.generation.finished_at = time.perf_counter()
        self.requests.pop(request.request_id, None)
        self._trials.end(request)

    def lost(self, connection: EngineConnection, requests: Iterable[InFlight], died: bool) -> None:
        """Move the requests of a lost engine. One whose engines died too often is given up: it may be the cause."""
        if died:
            culprit = self._trials.convict(connection)
            if culprit is not None:
                self._put_into_quarantine(culprit, connection)
            for request in requests if culprit is None else (culprit,):
                request.losses += 1
        for request in requests:
            request.attempt_ended("lost", "the engine was lost")
            self._trials.end(request)
            request.avoid = {connection}
            if died:
                request.waiting_since = None
            if request.losses > self._max_failovers:
                logger.error(
                    "request %d is given up: %d engines died while they had it", request.request_id, request.losses
                )
                message = f"{request.losses} engines died under this request; it is not tried again"
                self._give_up(request, GenerationError(message, 500))
            else:
                self.counts.failovers += 1
                self.counts.failover_reasons[connection.lost_for] += 1
                self._place_or_wait(request)

    def survived(self, connection: EngineConnection) -> None:
        """An engine that was taken for dead is the same process still: nobody has killed it."""
        fingerprint, connection.convicted = connection.convicted, None
        if fingerprint is not None:
            logger.warning("engine %s did not die: the prompt on trial there is refused no longer", connection.address)
            self.quarantine.set(fingerprint, 0)
            self._tell_engines([Quarantined(fingerprint, 0)])

    def returned(self, connection: EngineConnection, request: InFlight, reason: FinishReason) -> None:
        """Move a request that its engine gave back: each other engine is tried once."""
        request.attempt_ended(reason.name.lower())
        request.avoid.add(connection)
        self._trials.end(request)
        if reason is FinishReason.HANDED_OVER:
            self.counts.handovers += 1
            if connection.state is ConnectionState.DRAINING:
                request.waiting_since = None
            self._place_or_wait(request)
            return
        self.counts.overloads += 1
        if self._place(request, [engine for engine in self.engines if engine not in request.avoid]):
            return
        if request.output_token_ids or request.losses:
            # The client already reads this stream, or was accepted before: it waits its turn.
            self._wait(request)
        else:
            message = "every engine has as many waiting requests as it takes; try again in a moment"
            self._give_up(request, GenerationError(message, 429, RETRY_WHEN_OVERLOADED))

    def place_waiting(self) -> None:
        """Try the requests that wait for an engine, in the order in which they came to wait."""
        if not self.engines:
            return
        for request_id, request in list(self._waiting.items()):
            if request_id not in self._waiting:
                continue
            request.avoid.clear()
            if not self.engines:
                return
            if self._has_other_weights(request) or self._place(request, self.engines):
                self._waiting.pop(request_id, None)

    def expire_waiting(self) -> None:
        """End the requests that waited too long for an engine, or past their deadline."""
        now = self._clock()
        unix_now = time.time()
        for request in list(self._waiting.values()):
            deadline = request.generation.deadline
            if deadline is not None and unix_now >= deadline:
                self._forget(request)
                request.deliver(RequestOutput(request.request_id, finish_reason=FinishReason.ABORT))
            elif request.waiting_since is not None and now - request.waiting_since >= self._no_engine_timeout:
                self._give_up(request, self._no_engine())

    def fail_all(self, error: GenerationError) -> None:
        """End every request, and have the engines stop."""
        for request in list(self.requests.values()):
            self.abort(request.request_id)
            request.fail(error)

    def _place_or_wait(self, request: InFlight) -> None:
        if self._has_other_weights(request):
            return
        others = [engine for engine in self.engines if engine not in request.avoid]
        if not self._place(request, others or self.engines):
            self._wait(request)

    def _place(self, request: InFlight, engines: Sequence[EngineConnection]) -> bool:
        # An attempt's id is new, but for the first: that one is the request's own.
        wire_id = request.request_id if request.wire_id == 0 else new_request_id()
        is_suspect = self._trials.is_suspect(request)
        if is_suspect:
            any_engine = bool(engines)
            engines = self._trials.free_engines(engines)
            if any_engine and not engines:
                # It waits for others' trials, not for an engine to come.
                request.waiting_since = self._clock()
        while engines:
            engine = self._policy.choose(engines, request.generation)
            if engine.add(request, wire_id):
                if is_suspect:
                    self._trials.begin(engine, request)
                self._policy.sent(engine, request.generation, request.num_tokens)
                request.generation.trace.sent(engine.address)
                return True
            engines = [other for other in engines if other is not engine]
        return False

    def _wait(self, request: InFlight) -> None:
        # One that only bounced off engines goes on with the wait that it had.
        if request.waiting_since is None or len(request.output_token_ids) != request.tokens_when_waiting:
            request.waiting_since = self._clock()
            request.tokens_when_waiting = len(request.output_token_ids)
        self._waiting[request.request_id] = request

    def _has_other_weights(self, request: InFlight) -> bool:
        """Give up a stream that cannot go on because every engine now serves other weights."""
        if not request.output_token_ids or not self.engines or self.engines[0].fingerprint == request.fingerprint:
            return False
        message = "the model was replaced while this answer was being written"
        self._give_up(request, GenerationError(message, 503, RETRY_WHEN_OVERLOADED, reason="failed"))
        return True

    def _put_into_quarantine(self, culprit: InFlight, connection: EngineConnection) -> None:
        if not self._quarantine_time:
            return
        connection.convicted = prompt_fingerprint(pack_token_ids(culprit.generation.prompt_token_ids))
        self.quarantine.set(connection.convicted, self._quarantine_time)
        logger.error(
            "the prompt of request %d (%d tokens, fingerprint %016x) is refused for %g s: engine %s died while it was "
            "on trial there",
            culprit.request_id,
            len(culprit.generation.prompt_token_ids),
            connection.convicted,
            self._quarantine_time,
            connection.address,
        )
        self._tell_engines(self.quarantine.entries())

    def _tell_engines(self, quarantined: list[Quarantined]) -> None:
        for engine in list(self.engines):
            engine.send_heartbeat(quarantined)

    def _refuse_quarantined(self, generation: Generation) -> None:
        left = self.quarantine.seconds_left(prompt_fingerprint(pack_token_ids(generation.prompt_token_ids)))
        if left:
            # 400, so that no client sends it again by itself.
            raise GenerationError(
                f"engines died again and again under this very prompt: it is refused for another {left:.0f} s", 400
            )

    def _give_up(self, request: InFlight, error: GenerationError) -> None:
        request.attempt_ended("given_up", error.message)
        self._forget(request)
        self.counts.given_up += 1
        request.fail(error)

    def _forget(self, request: InFlight) -> None:
        self.requests.pop(request.request_id, None)
        self._waiting.pop(request.request_id, None)

    def _no_engine(self) -> GenerationError:
        return GenerationError(
            f"no engine for model {self._model!r} is ready; try again in a few seconds", 503, RETRY_WHEN_NO_ENGINE
        )
