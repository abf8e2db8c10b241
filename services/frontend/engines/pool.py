"""One model's engines: finds them, decides which may be used, watches them, and closes them.

What the HTTP side calls. `discovery` names the engines, `connection` speaks to each, `dispatch` keeps the requests.
"""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable

import msgspec

from services.frontend.engines.aliases import Aliases
from services.frontend.engines.compatibility import protocol_refusal, weights_refusal
from services.frontend.engines.connection import EngineConnection
from services.frontend.engines.connection_state import ConnectionState
from services.frontend.engines.discovery import discovery_for
from services.frontend.engines.dispatch import RETRY_WHEN_NO_ENGINE, DispatchCounts, Dispatcher
from services.frontend.engines.in_flight import InFlight
from services.frontend.engines.link import Transport
from services.frontend.engines.policies import routing_policy
from services.frontend.engines.status import EngineStatus, status_of
from services.frontend.engines.zmq_link import ZmqTransport
from services.frontend.generation import Generation, GenerationError
from services.frontend.settings import EnginePoolSettings, FrontendSettings
from shared.link_keys import read_link_keys
from shared.protocol import FinishReason, ModelLimits, Quarantined, Welcome, new_boot_id

logger = logging.getLogger(__name__)

_RESTART_DELAY = 1.0  # seconds before a background task that failed is started again


class EnginePool:
    """The engines of one model. Every method belongs to the event loop's thread.

    `check` says why an engine must not be used (its vocabulary is not the tokenizer's, for instance), or None.
    Raises ValueError where an engine address is not host:port, or where the link's keys are none.
    """

    def __init__(
        self,
        name: str,
        settings: FrontendSettings,
        pool: EnginePoolSettings,
        check: Callable[[Welcome], str | None],
        *,
        transport: Transport | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.limits: ModelLimits | None = None
        self.boot_id = new_boot_id()
        self.connections: dict[str, EngineConnection] = {}
        self._settings = settings
        self._check = check
        self._clock = clock
        self._discovery = discovery_for(pool, settings.dns_interval)
        self._transport = transport
        self._link_keys = None if settings.link_keys is None else read_link_keys(settings.link_keys, "frontend")
        self._dispatcher = Dispatcher(
            name,
            routing_policy(settings),
            settings.max_concurrent_requests,
            settings.max_failovers,
            settings.no_engine_timeout,
            settings.quarantine_time,
            clock,
        )
        self._aliases = Aliases(settings.heartbeat_timeout, clock)
        self._found: set[str] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._place_is_due = False
        self._has_measures = False
        self._longest_pause = (settings.heartbeat_interval + settings.heartbeat_timeout) / 2
        self._last_tick = clock()
        self._held_up_at = -math.inf
        self._stopped = False

    @property
    def ready(self) -> bool:
        """Whether an engine takes requests now."""
        return bool(self._dispatcher.engines)

    @property
    def num_ready(self) -> int:
        """Engines that take requests now."""
        return len(self._dispatcher.engines)

    @property
    def num_requests(self) -> int:
        """Requests in flight, those that wait for another engine included."""
        return len(self._dispatcher.requests)

    @property
    def num_refusing(self) -> int:
        """Engines that are there and that this process cannot speak with: see `handshake_failure`."""
        return sum(each.handshake_failure is not None for each in self.connections.values())

    @property
    def num_waiting(self) -> int:
        """Requests that no engine has."""
        return self._dispatcher.num_waiting

    @property
    def num_blocked(self) -> int:
        """Links that take no more messages for now."""
        return sum(connection.is_blocked for connection in self.connections.values())

    @property
    def counts(self) -> DispatchCounts:
        return self._dispatcher.counts

    def statuses(self) -> list[EngineStatus]:
        """Every engine that is known, by address."""
        return [status_of(connection) for _, connection in sorted(self.connections.items())]

    async def start(self) -> None:
        """Begin to look for engines. Waits for none of them: `ready` tells."""
        if self._transport is None:
            settings = self._settings
            self._transport = ZmqTransport(
                settings.heartbeat_interval, settings.heartbeat_timeout, self._link_keys, self.counts.link
            )
        self._last_tick = self._clock()
        self._tasks = [
            asyncio.create_task(self._supervise("search for engines", self._watch_discovery)),
            asyncio.create_task(self._supervise("watch over engines", self._watch_engines)),
        ]

    async def stop(self) -> None:
        """Fail what is still in flight, have the engines abort it, and leave them."""
        self._stopped = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._dispatcher.fail_all(_shutting_down())
        for connection in list(self.connections.values()):
            connection.close(farewell="the frontend stops")
        if self._transport is not None:
            await self._transport.close()

    def submit(self, generation: Generation) -> None:
        """Send a generation to an engine. Raises GenerationError: 503 when none is ready, 429 when overloaded."""
        if self._stopped:
            raise _shutting_down()
        self._dispatcher.submit(generation)

    def abort(self, request_id: int) -> None:
        """End a generation whose client is gone. Its sink hears nothing more. Unknown ids are ignored."""
        self._dispatcher.abort(request_id)

    # The background tasks.

    async def _supervise(self, what: str, run: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await run()
                logger.error("the %s of model %s ended; it is started again", what, self.name)
            except Exception:
                logger.exception("the %s of model %s failed; it is started again", what, self.name)
            await asyncio.sleep(_RESTART_DELAY)

    async def _watch_discovery(self) -> None:
        await self._discovery.watch(self.engines_found)

    async def _watch_engines(self) -> None:
        while True:
            self.tick()
            await asyncio.sleep(self._settings.heartbeat_interval / 2)

    def engines_found(self, addresses: set[str]) -> None:
        """Connect to addresses that are new, and use those that are gone no more than their streams need."""
        self._found = addresses
        self._aliases.keep_only(addresses)
        self._connect_missing()
        for address, connection in list(self.connections.items()):
            gone = address not in addresses
            if gone != connection.retired:
                connection.retired = gone
                logger.info("engine %s is %s", address, "no longer named; it drains" if gone else "named again")
                if not gone:
                    # Engines with other weights may have taken its place.
                    connection.reconsider()
        self._choose_engines()

    def tick(self) -> None:
        """Everything that depends on time alone; called twice a heartbeat interval."""
        now, last = self._clock(), self._last_tick
        self._last_tick = now
        punctual = now - last < self._longest_pause
        if not punctual:
            self._held_up_at = now
            logger.warning("this process was held up for %.1f s; no engine is judged by that time", now - last)
        for connection in list(self.connections.values()):
            try:
                connection.tick(punctual)
            except Exception:
                logger.exception("the watch over engine %s failed", connection.address)
            if connection.retired and not connection.in_flight:
                connection.close(farewell="the frontend no longer finds this engine")
        self._aliases.forget_unused(self.connections.values())
        self._connect_missing()
        self._dispatcher.expire_waiting()
        self._dispatcher.place_waiting()

    @property
    def _was_held_up(self) -> bool:
        """Whether this process is, or was until a moment ago, behind with everything."""
        now = self._clock()
        return (
            now - self._last_tick >= self._longest_pause or now - self._held_up_at < self._settings.heartbeat_interval
        )

    def _connect_missing(self) -> None:
        assert self._transport is not None
        settings = self._settings
        for address in sorted(self._found - self.connections.keys() - self._aliases.addresses.keys()):
            try:
                self.connections[address] = EngineConnection(
                    address,
                    self.boot_id,
                    self,
                    self._transport,
                    settings.heartbeat_interval,
                    settings.heartbeat_timeout,
                    self._clock,
                )
            except Exception as error:
                # The others are not to suffer; the next tick tries again.
                logger.error("cannot open a link to engine %s: %s", address, error)

    # What connections tell.

    def refusal(self, connection: EngineConnection, welcome: Welcome) -> str | None:
        """Why this engine must not be used beside the others, or None."""
        refusal = protocol_refusal(welcome)
        if refusal is not None:
            return refusal
        if self._aliases.is_alias(connection, welcome, self.connections.values()):
            logger.warning("%s is another address of an engine that is already connected", connection.address)
            # Without a farewell, which would end the requests on the other connection.
            connection.close()
            return None
        refusal = weights_refusal(self.name, welcome, [each for each in self._measures() if each is not connection])
        if refusal is not None:
            return refusal
        try:
            return self._check(welcome)
        except Exception as error:
            logger.exception("engine %s could not be checked", connection.address)
            return f"checking it failed: {error}"

    def state_changed(self, connection: EngineConnection) -> None:
        if connection.state is ConnectionState.CLOSED and self.connections.get(connection.address) is connection:
            del self.connections[connection.address]
        self._choose_engines()

    def handshake_failed(self, connection: EngineConnection) -> None:
        self.counts.handshake_failures += 1

    def lost(self, connection: EngineConnection, requests: list[InFlight], died: bool) -> None:
        # What this process slept through says nothing of its engines.
        self._dispatcher.lost(connection, requests, died and not self._was_held_up)

    def survived(self, connection: EngineConnection) -> None:
        self._dispatcher.survived(connection)

    def quarantined(self) -> list[Quarantined]:
        return self._dispatcher.quarantine.entries()

    def returned(self, connection: EngineConnection, request: InFlight, reason: FinishReason) -> None:
        self._dispatcher.returned(connection, request, reason)

    def finished(self, request: InFlight) -> None:
        self._dispatcher.finished(request)

    def _measures(self) -> list[EngineConnection]:
        """The engines whose weights others must have. Not those that drain: their successors may differ."""
        return [each for each in self.connections.values() if each.state is ConnectionState.READY and not each.retired]

    def _choose_engines(self) -> None:
        was_ready = self.ready
        engines = [connection for connection in self.connections.values() if connection.can_take_requests]
        self._dispatcher.engines = engines
        limits = [engine.welcome.limits for engine in engines if engine.welcome is not None]
        if limits:
            # A request must fit whichever engine it meets.
            shortest = min(limits, key=lambda each: each.max_model_len)
            self.limits = msgspec.structs.replace(shortest)
        if was_ready != self.ready and not self._stopped:
            logger.log(
                logging.INFO if self.ready else logging.WARNING,
                "model %s: %s",
                self.name,
                "engines are ready" if self.ready else "no engine is ready",
            )
        had_measures, self._has_measures = self._has_measures, bool(self._measures())
        if had_measures and not self._has_measures:
            for connection in self.connections.values():
                if connection.state is ConnectionState.REFUSED:
                    connection.greet()
        if engines and not self._place_is_due:
            self._place_is_due = True
            asyncio.get_running_loop().call_soon(self._place_waiting)

    def _place_waiting(self) -> None:
        self._place_is_due = False
        self._dispatcher.place_waiting()


def _shutting_down() -> GenerationError:
    return GenerationError("this server is shutting down", 503, RETRY_WHEN_NO_ENGINE, reason="draining")
