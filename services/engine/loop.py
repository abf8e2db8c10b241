"""The engine's one loop: take what arrived, schedule, run the model, hand the outputs to the link.

Idle it takes the memory that steps will need, then blocks on the inbox; busy it never waits for the network. `main`
starts it and watches over its end.
"""

import logging
import threading
import time
from collections.abc import Callable

from services.engine.core import EngineCore, OutputsByPeer
from services.engine.link import Link
from services.engine.link_items import FromPeer, PeerJoined, PeerLeft
from services.engine.mailbox import Inbox
from services.engine.settings import EngineSettings
from shared.protocol import Abort, Add, Heartbeat

logger = logging.getLogger(__name__)

LINK_PEER = b""  # the sender of what the process tells its own loop


class EngineLoop:
    """Owns the core from `start` on. `on_end` is called from its thread when that ends, with the exception where
    one ended it; `on_step` after every step, with its seconds."""

    def __init__(
        self,
        core: EngineCore,
        inbox: Inbox[FromPeer],
        settings: EngineSettings,
        on_end: Callable[[BaseException | None], None],
        on_step: Callable[[float], None],
    ) -> None:
        self._core = core
        self._inbox = inbox
        self._idle_interval = settings.heartbeat_interval
        self._shutdown_grace = settings.shutdown_grace
        self._on_end = on_end
        self._on_step = on_step
        self._drain_asked = threading.Event()
        self._drain_until: float | None = None
        self._last_progress = time.monotonic()
        self._checked = True
        self._is_taking_memory = True
        self._thread = threading.Thread(target=self._run, name="loop", daemon=True)
        core.pending_grammars.on_ready = self._wake

    @property
    def seconds_since_progress(self) -> float:
        """Long only where a step hangs: idle, the loop still turns once in a while."""
        return time.monotonic() - self._last_progress

    def start(self, link: Link) -> None:
        self._link = link
        self._thread.start()

    def drain(self) -> None:
        """Take no new requests, finish what the grace allows, hand the rest over, end. From any thread."""
        self._drain_asked.set()
        self._wake()

    def join(self, timeout: float) -> bool:
        """Wait for the thread's end. False: it has not ended."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _wake(self) -> None:
        """Have the loop turn where it is idle. From any thread."""
        self._inbox.put((LINK_PEER, PeerLeft()), 0)

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            while self._turn():
                pass
        except BaseException as caught:
            logger.critical("The engine's loop failed; the engine ends", exc_info=True)
            error = caught
        self._on_end(error)

    def _turn(self) -> bool:
        """One round of the loop. False: it has drained."""
        core = self._core
        items = self._inbox.take_all(0 if core.has_work or self._is_taking_memory else self._idle_interval)
        self._last_progress = began = time.monotonic()
        for peer, message in items:
            self._handle(peer, message)
        if self._drain_asked.is_set() and self._has_drained(began):
            return False
        if core.has_work:
            self._checked = False
            self._send(core.step())
            self._on_step(time.monotonic() - began)
        else:
            if not self._checked and not core.num_requests:  # one may wait for its grammar
                core.check_when_idle()
                self._checked = True
            # Rates fall while nothing happens, and the last aborts may have freed blocks.
            self._send({})
            self._take_memory(until=began + self._idle_interval)
        return True

    def _take_memory(self, until: float) -> None:
        """Until something arrives, or the next turn is due, or there is no more to take."""
        while self._is_taking_memory and not len(self._inbox) and time.monotonic() < until:
            self._is_taking_memory = self._core.executor.take_memory()

    def _send(self, outputs: OutputsByPeer) -> None:
        core = self._core
        self._link.send_outputs(outputs, core.load(), core.take_block_events())
        if core.timelines.finished:
            self._link.send_spans(core.timelines.take_finished())

    def _handle(self, peer: bytes, message: Add | Abort | Heartbeat | PeerJoined | PeerLeft) -> None:
        core = self._core
        if isinstance(message, Add):
            core.add(peer, message)
        elif isinstance(message, PeerJoined):
            # What was on its way to it may be lost with its old connection: it starts over.
            core.abort_peer(peer)
            self._link.send_cache_content(peer, core.stored_block_hashes())
        elif isinstance(message, PeerLeft):
            core.abort_peer(peer)
        elif isinstance(message, Heartbeat):
            core.set_quarantined(message.quarantined)
        else:
            core.abort(peer, message.request_ids)

    def _has_drained(self, now: float) -> bool:
        core = self._core
        if self._drain_until is None:
            self._drain_until = now + self._shutdown_grace
            core.draining = True
            logger.info(
                "Draining: %d requests run, %d wait; up to %g s to finish",
                len(core.scheduler.running),
                len(core.scheduler.waiting),
                self._shutdown_grace,
            )
            self._link.send_goodbye("the engine shuts down")
            # Another engine starts them sooner than this one could.
            core.hand_over(waiting_only=True)
        elif now >= self._drain_until and core.num_requests:
            logger.info("The grace is over: %d requests are handed over", core.num_requests)
            core.hand_over()
        if core.num_requests == 0:
            self._send(core.step() if core.has_work else {})
            core.check_when_idle()
            return True
        return False
