"""One engine as this process sees it: HELLO and WELCOME, heartbeats, its load, and the requests that it has.

    CONNECTING ──WELCOME──▶ READY ──GOODBYE──▶ DRAINING ──nothing left there──▶ PARTED
        ▲  └──refused──▶ REFUSED   │               │                                │
        └── link down, silence, a malformed message, a new boot id ─────────────────┘

`outbox` and `link` carry its bytes, `dispatch` gives it requests, `pool` owns it and calls `tick`.
"""

import logging
import math
import time
from collections.abc import Callable

from services.frontend.engines.connection_state import ConnectionOwner, ConnectionState
from services.frontend.engines.counts import Loss
from services.frontend.engines.in_flight import InFlight
from services.frontend.engines.link import Transport
from services.frontend.engines.load import EngineLoad
from services.frontend.engines.outbox import Outbox
from services.frontend.engines.prefix_index import PrefixIndex
from shared.protocol import (
    PROTOCOL_VERSION,
    FinishReason,
    Goodbye,
    Heartbeat,
    Hello,
    MalformedMessage,
    Outputs,
    Quarantined,
    RequestOutput,
    ToFrontend,
    Welcome,
    decode_to_frontend,
)
from shared.rare_log import RareLog

logger = logging.getLogger(__name__)


class EngineConnection:
    """Every method belongs to the event loop's thread. Times are of `clock`, in seconds."""

    def __init__(
        self,
        address: str,
        boot_id: bytes,
        owner: ConnectionOwner,
        transport: Transport,
        heartbeat_interval: float,
        heartbeat_timeout: float,
        clock: Callable[[], float],
    ) -> None:
        self.address = address
        self.state = ConnectionState.CONNECTING
        self.retired = False  # discovery no longer names it: nothing new, and closed when empty
        self.welcome: Welcome | None = None  # the last one, which may be of an engine since lost
        self.load = EngineLoad()
        self.prefixes = PrefixIndex(clock)
        self.in_flight: dict[int, InFlight] = {}
        self.lost_at = -math.inf
        self.lost_for: Loss = "disconnected"
        self.convicted: int | None = None  # the fingerprint of the prompt that was on trial as the engine was lost
        self.stale_outputs = 0
        self.handshake_failure: str | None = None  # why the last one failed, until one succeeds
        self._boot_id = boot_id
        self._owner = owner
        self._clock = clock
        self._heartbeat_interval = heartbeat_interval
        self._heartbeat_timeout = heartbeat_timeout
        self._outbox = Outbox(lambda data: self._link.send(data), clock, lambda: owner.state_changed(self))
        self._malformed_log = RareLog(logger, logging.ERROR)
        self._link_is_up = False
        self._greeted_at: float | None = None
        self._last_hello = -math.inf
        self._last_heard = -math.inf
        self._refused_for: tuple[bytes, str] | None = None
        self._turned_away_for: str | None = None
        self._link = transport.open(address, boot_id, self)

    def __repr__(self) -> str:
        return f"engine {self.address} ({self.state.name.lower()}, {len(self.in_flight)} in flight)"

    # What dispatch and pool ask of it.

    @property
    def can_take_requests(self) -> bool:
        return self.state is ConnectionState.READY and not self.retired and not self.is_blocked

    @property
    def is_blocked(self) -> bool:
        """Whether its link takes no more messages for now."""
        return self._outbox.blocked_since is not None

    @property
    def is_serving(self) -> bool:
        return self.state is ConnectionState.READY or self.state is ConnectionState.DRAINING

    @property
    def fingerprint(self) -> str:
        """Of the weights that it serves, or served last."""
        return self.welcome.fingerprint if self.welcome is not None else ""

    @property
    def block_size(self) -> int:
        """Of its KV cache, in tokens."""
        return self.welcome.limits.block_size if self.welcome is not None else 1

    def add(self, request: InFlight, wire_id: int) -> bool:
        """Send the request to this engine under `wire_id`. False: it takes nothing now."""
        assert self.welcome is not None
        request.wire_id = wire_id
        if not self._outbox.send(request.add_message()):
            return False
        request.connection = self
        request.fingerprint = self.welcome.fingerprint
        self.in_flight[wire_id] = request
        return True

    def abort(self, request: InFlight) -> None:
        """Have the engine stop; at once, or as soon as it takes messages again."""
        if self.in_flight.pop(request.wire_id, None) is not None:
            self._outbox.owe_aborts([request.wire_id])
            self._outbox.send_aborts()

    def send_heartbeat(self, quarantined: list[Quarantined]) -> None:
        """Tell it that this process lives, and which prompts to refuse."""
        self._outbox.send(Heartbeat(quarantined=quarantined))

    def greet(self) -> None:
        """Say HELLO. The WELCOME decides anew whether the engine is used.

        Never with requests in flight: HELLO begins anew, and the engine drops what it has of this frontend."""
        if not self._link_is_up or self.is_serving:
            return
        now = self._clock()
        self._last_hello = now
        if self._greeted_at is None:
            self._greeted_at = now
        self._outbox.send(Hello(protocol_version=PROTOCOL_VERSION, boot_id=self._boot_id))

    def reconsider(self) -> None:
        """Decide anew, by the last WELCOME, whether the engine is used."""
        if self.is_serving and self.welcome is not None:
            refusal = self._owner.refusal(self, self.welcome)
            if refusal is not None:
                self._refuse(refusal, self.welcome)

    def close(self, farewell: str | None = None) -> None:
        """Stop for good. `farewell` makes the engine abort whatever this process still has there."""
        if self.state is ConnectionState.CLOSED:
            return
        if farewell is not None and self._link_is_up and self.state is not ConnectionState.PARTED:
            self._outbox.send(Goodbye(farewell))
        requests = self._take_requests()
        self.lost_for = "removed"
        self.state = ConnectionState.CLOSED
        self._link.close()
        if requests:
            self._owner.lost(self, requests, died=False)
        self._owner.state_changed(self)

    def tick(self, punctual: bool) -> None:
        """Notice silence, break our own, repeat what could not be sent. Called twice a heartbeat interval or more.

        `punctual` is False after this process itself was held up: the silence may then be its own."""
        now = self._clock()
        if self.state is ConnectionState.CLOSED or not self._link_is_up:
            return
        if self.is_serving:
            self._outbox.send_aborts()
            blocked_since = self._outbox.blocked_since
            if punctual and now - self._last_heard >= self._heartbeat_timeout:
                self._lose("silent", f"it was silent for {now - self._last_heard:.1f} s", reset=True)
            elif blocked_since is not None and now - blocked_since >= self._heartbeat_timeout:
                self._lose("blocked", f"it took no message for {now - blocked_since:.1f} s", reset=True)
            elif self.state is ConnectionState.DRAINING and not self.in_flight:
                self._part()
            elif now - self._outbox.last_sent >= self._heartbeat_interval or blocked_since is not None:
                self.send_heartbeat(self._owner.quarantined())
        elif self.state is ConnectionState.CONNECTING:
            if self._greeted_at is not None and now - self._greeted_at >= self._heartbeat_timeout:
                # A peer that never answers may be a half-open connection: a fresh one tells.
                self._reset_link()
            elif now - self._last_hello >= self._heartbeat_interval:
                self.greet()

    # What the link tells.

    def link_up(self) -> None:
        if self._link_is_up and self.is_serving:
            self._lose("disconnected", "it connected anew", reset=False)
        self._link_is_up = True
        self.handshake_failure = None
        self._outbox.blocked_since = self._greeted_at = None
        self.state = ConnectionState.CONNECTING
        self.greet()

    def link_down(self, reason: str) -> None:
        self._link_is_up = False
        if self.is_serving:
            self._lose("disconnected", reason, reset=False)
        self.state = ConnectionState.CONNECTING

    def link_failed(self, reason: str) -> None:
        if reason != self.handshake_failure:
            self.handshake_failure = reason
            logger.error("no link to engine %s (it is tried again): %s", self.address, reason)
        self._owner.handshake_failed(self)

    def link_received(self, data: bytes) -> None:
        try:
            self._on_message(decode_to_frontend(data))
        except MalformedMessage as error:
            self._on_malformed(error)
        except Exception:
            logger.exception("a message of engine %s could not be handled", self.address)
            if self.is_serving:
                self._lose("malformed", "a message of it could not be handled and may have held tokens", reset=True)

    def _on_message(self, message: ToFrontend) -> None:
        self._last_heard = self._clock()
        if isinstance(message, Outputs):
            self.load.update(message.load)
            self.prefixes.update(message.stored_block_hashes, message.evicted_block_hashes)
            began = time.perf_counter()
            self._deliver(message.outputs)
            self._owner.counts.output_seconds.observe(time.perf_counter() - began)
            if self.state is ConnectionState.DRAINING:
                self._part()
        elif isinstance(message, Heartbeat):
            if message.load is not None:
                self.load.update(message.load)
            self.prefixes.update(message.stored_block_hashes, message.evicted_block_hashes)
        elif isinstance(message, Welcome):
            self._on_welcome(message)
        else:
            self._on_goodbye(message.reason or "no reason given")

    def _on_goodbye(self, reason: str) -> None:
        if self.state is ConnectionState.READY:
            logger.info("engine %s drains: %s", self.address, reason)
            self._set_state(ConnectionState.DRAINING)
            self._part()
        elif self.state is ConnectionState.CONNECTING and reason != self._turned_away_for:
            self._turned_away_for = reason
            logger.error("engine %s turns this frontend away (it is asked again): %s", self.address, reason)

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        # The only loop over tokens in this process: what it calls, it calls once an output.
        in_flight = self.in_flight
        for output in outputs:
            request = in_flight.get(output.request_id)
            if request is None:
                self.stale_outputs += 1
                self._owner.counts.link.stale_outputs += 1
                continue
            finish_reason = output.finish_reason
            if finish_reason is None:
                if request.deliver(output):
                    self.abort(request)
                    self._owner.finished(request)
            elif finish_reason is FinishReason.OVERLOADED or finish_reason is FinishReason.HANDED_OVER:
                self._give_back(request, output, finish_reason)
            else:
                del in_flight[output.request_id]
                request.deliver(output)
                self._owner.finished(request)

    def _give_back(self, request: InFlight, output: RequestOutput, reason: FinishReason) -> None:
        output.finish_reason = None
        if (output.token_ids or output.prompt_logprobs) and request.deliver(output):
            self.in_flight.pop(request.wire_id, None)
            self._owner.finished(request)
        elif self.in_flight.pop(request.wire_id, None) is not None:
            request.connection = None
            if reason is FinishReason.HANDED_OVER and self.state is ConnectionState.READY:
                # One that drains says GOODBYE first. The next tick says HELLO again.
                self._lose("restarted", "it does not know this frontend any more", reset=False, died=False)
            self._owner.returned(self, request, reason)

    def _on_welcome(self, welcome: Welcome) -> None:
        known, self.welcome = self.welcome, welcome
        if known is not None and known.boot_id != welcome.boot_id:
            if self.is_serving:
                self._lose("restarted", "another process answers in its place", reset=False)
            self._outbox.forget_aborts()
        elif known is not None:
            self._owner.survived(self)
        self.convicted = None
        self.load.update(welcome.load)
        # The engine goes on with everything that its cache holds.
        self.prefixes.reset(welcome.load.total_blocks)
        refusal = self._owner.refusal(self, welcome)
        if self.state is ConnectionState.CLOSED:
            return
        if refusal is not None:
            self._refuse(refusal, welcome)
            return
        if not self.is_serving:
            logger.info("engine %s serves %s", self.address, welcome.model)
        self._refused_for = self._turned_away_for = None
        # Before any new request: what it still runs of ours from an earlier connection is nobody's.
        self._outbox.send_aborts()
        self._set_state(ConnectionState.DRAINING if welcome.draining else ConnectionState.READY)
        if welcome.draining:
            self._part()
        elif quarantined := self._owner.quarantined():
            self.send_heartbeat(quarantined)

    def _part(self) -> None:
        """Tell an engine that drains once nothing is left there, which it waits for before it ends: what it has sent
        may be lost with the connection until then."""
        farewell = Goodbye("nothing of this frontend is left on an engine that drains")
        if not self.in_flight and self._outbox.send(farewell):
            self._outbox.forget_aborts()
            self._set_state(ConnectionState.PARTED)

    def _refuse(self, refusal: str, welcome: Welcome) -> None:
        if self._refused_for != (welcome.boot_id, refusal):
            self._refused_for = (welcome.boot_id, refusal)
            logger.error("engine %s is left out: %s", self.address, refusal)
        if self.is_serving:
            self._lose("refused", "it must not be used any more", reset=False)
        self._outbox.send(Goodbye("this frontend cannot use the engine: " + refusal[:1000]))
        self._outbox.forget_aborts()
        self._set_state(ConnectionState.REFUSED)

    def _on_malformed(self, error: MalformedMessage) -> None:
        self._owner.counts.link.malformed += 1
        self._malformed_log.log("engine %s sent a malformed message, which is dropped: %s", self.address, error)
        if self.is_serving and self.in_flight:
            # It may have held tokens: its streams would go on with a gap.
            self._lose("malformed", "a message of it was malformed and may have held tokens", reset=True)

    def _lose(self, kind: Loss, reason: str, reset: bool, died: bool = True) -> None:
        """The engine's requests go elsewhere; should it still run them, it is told to stop when it is back."""
        # One that drains is about to end: that is nothing that its requests did.
        died = died and self.state is ConnectionState.READY
        self.state = ConnectionState.CONNECTING
        self.lost_at = self._clock()
        self.lost_for = kind
        self.prefixes.reset()
        requests = self._take_requests()
        log = logger.warning if died or requests else logger.info
        log("engine %s is lost: %s; %d requests move to others", self.address, reason, len(requests))
        if reset:
            self._reset_link()
        self._owner.state_changed(self)
        if requests:
            self._owner.lost(self, requests, died=died)

    def _take_requests(self) -> list[InFlight]:
        requests = list(self.in_flight.values())
        self._outbox.owe_aborts(self.in_flight)
        self.in_flight.clear()
        for request in requests:
            request.connection = None
        return requests

    def _reset_link(self) -> None:
        self._link_is_up = False
        self._outbox.blocked_since = self._greeted_at = None
        self._link.reset()

    def _set_state(self, state: ConnectionState) -> None:
        if self.state is not state:
            self.state = state
            self._owner.state_changed(self)
