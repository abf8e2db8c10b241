"""The engine's side of the link: one ROUTER, and the one thread that reads and writes it.

Towards the loop there are an inbox (what frontends sent, decoded) and an outbox (a step's outputs, encoded here);
neither side waits for the other (`link_items` go through both). `peers` holds what is known of each frontend.
"""

import logging
import threading
import time
from collections.abc import Callable

import zmq

from services.engine.core import OutputsByPeer
from services.engine.executor.interface import ModelDescription
from services.engine.kv_cache import BlockEvents
from services.engine.link_items import CacheContent, Draining, FromPeer, PeerJoined, PeerLeft, Spans, StepOutputs, Stop
from services.engine.mailbox import Inbox, Outbox
from services.engine.metric_catalogue import STEP_PHASE_SECONDS
from services.engine.outputs_encoding import encode_outputs
from services.engine.peers import MAX_PEERS, Peer, Peers
from services.engine.router_socket import RouterSocket
from services.engine.settings import EngineSettings
from shared.link_keys import LinkKeys
from shared.protocol import (
    MAX_BLOCK_HASHES_PER_MESSAGE,
    PROTOCOL_VERSION,
    Abort,
    Add,
    FinishReason,
    Goodbye,
    Heartbeat,
    Hello,
    Load,
    MalformedMessage,
    ModelLimits,
    Outputs,
    RequestOutput,
    ToFrontend,
    Welcome,
    decode_to_engine,
    encode,
)
from shared.rare_log import RareLog
from shared.tracing import FinishedSpan

logger = logging.getLogger(__name__)

OLDEST_PROTOCOL_VERSION = max(1, PROTOCOL_VERSION - 1)
MAX_OUTBOX_STEPS = 10_000
MESSAGES_PER_PASS = 256
# A frontend takes in some 10,000 hashes a millisecond, on its event loop.
MAX_HASHES_PER_MESSAGE = min(25_000, MAX_BLOCK_HASHES_PER_MESSAGE)
RETRY_SECONDS = 0.01
CLOSE_LINGER_SECONDS = 1.0


class Link:
    """Binds in the constructor; `start` begins to answer. `on_end` is called from its thread when that ends, with
    the exception where one ended it. Heartbeats stop while `is_alive` says that the loop hangs, so that frontends
    take their requests elsewhere."""

    def __init__(
        self,
        settings: EngineSettings,
        description: ModelDescription,
        limits: ModelLimits,
        boot_id: bytes,
        inbox: Inbox[FromPeer],
        is_alive: Callable[[], bool],
        on_end: Callable[[BaseException | None], None],
        keys: LinkKeys | None = None,
    ) -> None:
        self.export_spans: Callable[[list[FinishedSpan]], None] = lambda spans: None
        self.num_malformed = 0
        self.send_seconds = STEP_PHASE_SECONDS.distribution()
        self._description = description
        self._limits = limits
        self._boot_id = boot_id
        self._inbox = inbox
        self._is_alive = is_alive
        self._on_end = on_end
        self._interval = settings.heartbeat_interval
        self._timeout = settings.heartbeat_timeout
        self._outbox: Outbox[StepOutputs | CacheContent | Spans | Draining | Stop] = Outbox(MAX_OUTBOX_STEPS)
        self._load = Load()
        self._draining = False
        self._part_until: float | None = None  # once it is told to stop
        self._rare_log = RareLog(logger)
        self._router = RouterSocket(settings.link_host, settings.link_port, keys)
        self.handshake_failures = self._router.gatekeeper.failures
        self.peers = Peers(self._router, on_left=self._left)
        self.port = self._router.port
        self.counts = self._router.counts
        self._thread = threading.Thread(target=self._run, name="link", daemon=True)

    # From any thread

    @property
    def outbox_length(self) -> int:
        return len(self._outbox)

    # From the loop's thread

    def start(self, load: Load) -> None:
        self._load = load
        self._thread.start()

    def send_outputs(self, outputs: OutputsByPeer, load: Load, events: BlockEvents) -> None:
        """One message for each frontend that has outputs; the others learn of the events with a heartbeat."""
        self._outbox.put(StepOutputs(outputs, load, events))

    def send_cache_content(self, peer: bytes, stored: list[int]) -> None:
        self._outbox.put(CacheContent(peer, stored))

    def send_spans(self, spans: list[FinishedSpan]) -> None:
        """They are made ready for the exporter here, not between two steps."""
        self._outbox.put(Spans(spans))

    def send_goodbye(self, reason: str) -> None:
        """Tell all frontends, and those that come, that the engine drains."""
        self._outbox.put(Draining(reason))

    def stop(self, linger: float) -> None:
        """End the thread once every frontend has said GOODBYE, at the latest after `linger` seconds. The loop has
        ended before: nobody takes a request any more."""
        self._outbox.put(Stop(linger))

    def join(self, timeout: float) -> bool:
        """Wait for the thread's end. False: it has not ended."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    # The link's thread

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            self._serve()
        except BaseException as caught:
            logger.critical("The link's thread failed; the engine ends", exc_info=True)
            error = caught
        finally:
            self._router.close(linger=0.0 if error else CLOSE_LINGER_SECONDS)
            self._outbox.close()
            self._on_end(error)

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._outbox.descriptor, zmq.POLLIN)
        gatekeeper = self._router.gatekeeper
        for socket in gatekeeper.sockets:
            poller.register(socket, zmq.POLLIN)
        reading = False
        next_tick = last_pass = deaf_since = time.monotonic()
        while not self._has_parted(last_pass):
            if self._inbox.is_full == reading:
                reading = not reading
                if reading:
                    poller.register(self._router.socket, zmq.POLLIN)
                    self.peers.excuse_silence(time.monotonic() - deaf_since)
                else:
                    poller.unregister(self._router.socket)
                    deaf_since = time.monotonic()
            wait = max(0.0, next_tick - last_pass)
            if self.peers.any_behind or not reading:
                wait = min(wait, RETRY_SECONDS)
            if self._part_until is not None:
                wait = min(wait, max(0.0, self._part_until - last_pass))
            ready = dict(poller.poll(int(wait * 1000) + 1))
            now = time.monotonic()
            if now - last_pass > wait + self._interval:
                # This thread was held up, not the frontends: what they sent meanwhile is still to be read.
                self.peers.excuse_silence(now - last_pass)
            last_pass = now
            for item in self._outbox.take_all() if self._outbox.descriptor in ready else ():
                self._take_item(item, now)
            gatekeeper.attend(ready)
            if self._router.socket in ready:
                self._read(now)
            if self.peers.any_behind:
                self.peers.retry()
            if now >= next_tick:
                next_tick = now + self._interval / 4
                self._tick(now, listening=reading)

    def _read(self, now: float) -> None:
        for _ in range(MESSAGES_PER_PASS):
            if self._inbox.is_full:
                return
            frames = self._router.receive()
            if frames is None:
                return
            identity = frames[0]
            try:
                if len(frames) != 2:
                    raise MalformedMessage(f"{len(frames) - 1} frames where one is expected")
                self._receive(identity, frames[1], now)
            except MalformedMessage as error:
                self.num_malformed += 1
                self._rare_log.log("Dropped a malformed message of frontend %s: %s", identity.hex(), error)

    def _receive(self, identity: bytes, data: bytes, now: float) -> None:
        message = decode_to_engine(data)
        peer = self.peers.get(identity)
        if isinstance(message, Hello):
            self._welcome(identity, message, now)
        elif peer is None:
            if isinstance(message, Add):
                # It speaks to a former self of this engine: another must take the request, and HELLO comes first.
                self._router.send(identity, self._hand_over(message))
            self._rare_log.log("Ignored %s of frontend %s: no HELLO", type(message).__name__, identity.hex())
        else:
            peer.last_heard = now
            if isinstance(message, Goodbye):
                logger.info("Frontend %s leaves: %s", peer.name, message.reason or "no reason given")
                self.peers.leave(peer)
            elif self._part_until is None:
                if isinstance(message, (Add, Abort)) or message.quarantined:
                    self._inbox.put((identity, message), len(data))
            elif isinstance(message, Add):
                self.peers.send(peer, self._hand_over(message))

    def _welcome(self, identity: bytes, hello: Hello, now: float) -> None:
        if hello.boot_id != identity:
            raise MalformedMessage("HELLO's boot id is not the socket's identity")
        if hello.protocol_version < OLDEST_PROTOCOL_VERSION:
            refusal = (
                f"the frontend speaks version {hello.protocol_version} of the protocol, and this engine "
                f"{OLDEST_PROTOCOL_VERSION} to {PROTOCOL_VERSION}: update the frontend"
            )
        elif self.peers.get(identity) is None and len(self.peers) >= MAX_PEERS:
            refusal = f"{MAX_PEERS} frontends are connected already"
        else:
            refusal = None
        if refusal is not None:
            self._rare_log.log("Refused frontend %s: %s", identity.hex(), refusal)
            self._router.send(identity, encode(Goodbye(refusal)))
            return
        peer = self.peers.join(identity, now)
        # Before the loop learns of it, so that WELCOME precedes any output.
        self._send(peer, self._welcome_message())
        self._inbox.put((identity, PeerJoined()), 0)

    def _welcome_message(self) -> Welcome:
        return Welcome(
            protocol_version=PROTOCOL_VERSION,
            boot_id=self._boot_id,
            model=self._description.name,
            fingerprint=self._description.fingerprint,
            limits=self._limits,
            load=self._load,
            draining=self._draining,
        )

    def _take_item(self, item: StepOutputs | CacheContent | Spans | Draining | Stop, now: float) -> None:
        if isinstance(item, StepOutputs):
            began = time.perf_counter()
            self._send_step(item, now)
            if item.outputs:
                self.send_seconds.observe(time.perf_counter() - began)
        elif isinstance(item, CacheContent):
            peer = self.peers.get(item.peer)
            if peer is not None:
                peer.block_events.replace(item.stored)
        elif isinstance(item, Spans):
            self.export_spans(item.spans)
        elif isinstance(item, Draining):
            self._draining = True
            for peer in self.peers:
                self._send(peer, Goodbye(item.reason))
        else:
            self._part(now + item.linger)

    def _send_step(self, step: StepOutputs, now: float) -> None:
        self._load = step.load
        for peer in self.peers:
            if step.events:
                peer.block_events.add(step.events)
            outputs = step.outputs.get(peer.identity)
            if outputs is None:
                continue
            stored, evicted = peer.block_events.take(MAX_HASHES_PER_MESSAGE) if peer.block_events else ([], [])
            messages, too_large = encode_outputs(Outputs(outputs, step.load, stored, evicted))
            if too_large:
                self._inbox.put((peer.identity, Abort(too_large)), 0)
            for data in messages:
                self.peers.send(peer, data)
            peer.last_told = now

    def _send(self, peer: Peer, message: ToFrontend) -> None:
        self.peers.send(peer, encode(message))

    def _tick(self, now: float, listening: bool) -> None:
        """Find the silent, and tell those that were told nothing for a while that the engine lives. While nobody
        listens to them, because the inbox is full, all are silent and none is dead."""
        alive = self._is_alive()
        for peer in self.peers:
            if listening and now - peer.last_heard > self._timeout:
                self.peers.lose(peer, f"nothing was heard of it for {self._timeout:g} s")
            elif alive and now - peer.last_told >= self._interval:
                stored, evicted = peer.block_events.take(MAX_HASHES_PER_MESSAGE)
                peer.last_told = now
                self._send(peer, Heartbeat(self._load, stored, evicted))

    def _left(self, peer: Peer) -> None:
        self._inbox.put((peer.identity, PeerLeft()), 0)

    # The end. What has been sent is not yet the frontends': a connection that closes takes with it what their sockets
    # have received and not handed on (ZMQ_IMMEDIATE). So it is they who leave first, and what they send meanwhile
    # is answered.

    def _part(self, until: float) -> None:
        self._part_until = until
        for identity, message in self._inbox.take_all(0):
            peer = self.peers.get(identity)
            if peer is not None and isinstance(message, Add):
                self.peers.send(peer, self._hand_over(message))

    def _has_parted(self, now: float) -> bool:
        return self._part_until is not None and (not self.peers or now >= self._part_until)

    def _hand_over(self, add: Add) -> bytes:
        """The answer to a request that another engine must take."""
        output = RequestOutput(add.request_id, finish_reason=FinishReason.HANDED_OVER)
        return encode(Outputs([output], self._load))
