"""A link over ZMQ: one DEALER, read by the event loop's own readiness.

zmq.asyncio makes a future for every message; this reads a raw socket until it is empty instead, and hands
each message straight to its listener. `connection` is that listener.
"""

import asyncio
import logging
import math
import time

import zmq
from zmq.utils.monitor import parse_monitor_message

from services.frontend.engines.counts import LinkCounts
from services.frontend.engines.link import LinkListener
from shared.link_keys import CURVE_OVERHEAD_BYTES, LinkKeys
from shared.protocol import MAX_MESSAGE_BYTES

logger = logging.getLogger(__name__)

# A busy engine must not keep the loop from the others, nor from HTTP: a pass ends after so many messages, each of
# which may bring one chunk to every stream, or so many seconds.
MESSAGES_PER_PASS = 16
PASS_SECONDS = 0.004
SEND_QUEUE_MESSAGES = 4096
RECEIVE_QUEUE_MESSAGES = 4096
RECONNECT_MS = 50
RECONNECT_MAX_MS = 1000
CONNECT_TIMEOUT_MS = 3000
HANDSHAKE_TIMEOUT_MS = 3000
CLOSE_LINGER_MS = 500
# ZMQ's own default is 1023 sockets a context, which is some 340 engines.
MAX_SOCKETS = 65_535

# How long until a link is sought anew whose handshake failed for good: libzmq gives up such a connection.
RETRY_AFTER_REFUSAL_SECONDS = 1.0
# Connections that end in the handshake and say no more: one or two may be of an engine that just ended.
UNFINISHED_UNTIL_TOLD = 3

_HANDSHAKE_FAILURES = (
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL | zmq.Event.HANDSHAKE_FAILED_PROTOCOL | zmq.Event.HANDSHAKE_FAILED_AUTH
)
_MECHANISM_MISMATCH = int(zmq.Event.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH)
_MONITORED = zmq.Event.HANDSHAKE_SUCCEEDED | _HANDSHAKE_FAILURES | zmq.Event.DISCONNECTED | zmq.Event.MONITOR_STOPPED


class ZmqTransport:
    """The ZMQ context (one I/O thread) of one pool, the heartbeat times of its links, in seconds, and their keys."""

    def __init__(
        self,
        heartbeat_interval: float,
        heartbeat_timeout: float,
        keys: LinkKeys | None = None,
        counts: LinkCounts | None = None,
    ) -> None:
        self.keys = keys
        self.counts = LinkCounts() if counts is None else counts
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, min(MAX_SOCKETS, self._context.get(zmq.SOCKET_LIMIT)))
        self._interval_ms = max(1, int(heartbeat_interval * 1000))
        self._timeout_ms = max(1, int(heartbeat_timeout * 1000))

    def open(self, address: str, identity: bytes, listener: LinkListener) -> "ZmqLink":
        return ZmqLink(self, address, identity, listener)

    async def close(self) -> None:
        # Waits until the linger of every closed socket is over: not on the loop.
        await asyncio.to_thread(self._context.term)

    def new_socket(
        self, address: str, identity: bytes, engine_key: bytes | None
    ) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
        """A DEALER that seeks `address`, and the socket that tells what became of its connection."""
        socket = self._context.socket(zmq.DEALER)
        socket.set(zmq.ROUTING_ID, identity)
        # Nothing is queued for a peer that is not there, and what was queued for one that went goes with it:
        # a new process behind the same address must not get what was meant for the old one.
        socket.set(zmq.IMMEDIATE, 1)
        socket.set(zmq.IPV6, 1)
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.SNDHWM, SEND_QUEUE_MESSAGES)
        socket.set(zmq.RCVHWM, RECEIVE_QUEUE_MESSAGES)
        if self.keys is not None and engine_key is not None:
            socket.set(zmq.CURVE_PUBLICKEY, self.keys.public)
            socket.set(zmq.CURVE_SECRETKEY, self.keys.secret)
            socket.set(zmq.CURVE_SERVERKEY, engine_key)
        socket.set(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES + (CURVE_OVERHEAD_BYTES if self.keys else 0))
        socket.set(zmq.RECONNECT_IVL, RECONNECT_MS)
        socket.set(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
        socket.set(zmq.CONNECT_TIMEOUT, CONNECT_TIMEOUT_MS)
        socket.set(zmq.HANDSHAKE_IVL, HANDSHAKE_TIMEOUT_MS)
        socket.set(zmq.HEARTBEAT_IVL, self._interval_ms)
        socket.set(zmq.HEARTBEAT_TIMEOUT, self._timeout_ms)
        socket.set(zmq.HEARTBEAT_TTL, self._timeout_ms)
        monitor = socket.get_monitor_socket(_MONITORED)
        monitor.set(zmq.LINGER, 0)
        socket.connect(f"tcp://{address}")
        return socket, monitor


class ZmqLink:
    """A Link over TCP. Every method belongs to the event loop's thread."""

    def __init__(self, transport: ZmqTransport, address: str, identity: bytes, listener: LinkListener) -> None:
        self._transport = transport
        self._address = address
        self._identity = identity
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._socket: zmq.Socket[bytes] | None = None
        self._pass_is_due = False
        self._retry: asyncio.TimerHandle | None = None
        # While keys are exchanged for others, engines have one or another: each is tried in turn.
        self._engine_keys = () if transport.keys is None else transport.keys.peers
        self._key_index = 0
        self._num_unfinished = 0
        self._has_been_up = False
        self._counts = transport.counts
        self._open()

    def send(self, data: bytes) -> bool:
        socket = self._socket
        if socket is None:
            return False
        try:
            socket.send(data, zmq.NOBLOCK)
            sent = True
            self._counts.messages_out += 1
            self._counts.bytes_out += len(data)
        except zmq.Again:
            sent = False
        # Sending may have swallowed the descriptor's only sign that a message is waiting.
        if int(socket.get(zmq.EVENTS)) & zmq.POLLIN:
            self._read_soon()
        return sent

    def reset(self) -> None:
        self._close(linger_ms=0)
        self._open()

    def close(self) -> None:
        self._close(CLOSE_LINGER_MS)

    def _open(self) -> None:
        engine_key = self._engine_keys[self._key_index] if self._engine_keys else None
        self._socket, self._monitor = self._transport.new_socket(self._address, self._identity, engine_key)
        self._descriptor = int(self._socket.get(zmq.FD))
        self._monitor_descriptor = int(self._monitor.get(zmq.FD))
        self._loop.add_reader(self._descriptor, self._read)
        self._loop.add_reader(self._monitor_descriptor, self._read_monitor)
        # The descriptors speak of changes only, and the first may be over before the loop looks.
        self._loop.call_soon(self._read_monitor)

    def _close(self, linger_ms: int) -> None:
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        socket, self._socket = self._socket, None
        if socket is None:
            return
        self._loop.remove_reader(self._descriptor)
        self._loop.remove_reader(self._monitor_descriptor)
        socket.disable_monitor()
        self._monitor.close()
        socket.close(linger=linger_ms)

    def _read_soon(self) -> None:
        if not self._pass_is_due:
            self._pass_is_due = True
            self._loop.call_soon(self._read_again)

    def _read_again(self) -> None:
        self._pass_is_due = False
        self._read()

    def _read(self, seconds: float = PASS_SECONDS) -> None:
        socket = self._socket
        if socket is None:
            return
        ends = time.perf_counter() + seconds
        for _ in range(MESSAGES_PER_PASS):
            try:
                data = socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                # Empty, and the descriptor is armed again.
                return
            self._counts.messages_in += 1
            self._counts.bytes_in += len(data)
            self._listener.link_received(data)
            if self._socket is not socket:
                return
            if time.perf_counter() >= ends:
                break
        self._read_soon()

    def _read_monitor(self) -> None:
        socket, monitor = self._socket, self._monitor
        if socket is None:
            return
        while self._socket is socket:
            try:
                message = parse_monitor_message(monitor.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            event = message["event"]
            if event & _HANDSHAKE_FAILURES:
                self._on_failed_handshake(event, message["value"])
            elif event == zmq.Event.HANDSHAKE_SUCCEEDED:
                # Takes the new pipe in, so that the first send finds it.
                socket.get(zmq.EVENTS)
                self._num_unfinished = 0
                self._counts.reconnects += self._has_been_up
                self._has_been_up = True
                self._listener.link_up()
            elif event == zmq.Event.DISCONNECTED:
                # What the engine still said is worth having.
                self._read(math.inf)
                self._listener.link_down("the connection was closed")
            else:
                logger.error("the watch on the connection to engine %s ended; connecting anew", self._address)
                self._listener.link_down("the watch on the connection ended")
                if self._socket is socket:
                    self.reset()

    def _on_failed_handshake(self, event: int, value: int) -> None:
        is_final = event != zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
        self._num_unfinished += not is_final
        if is_final or self._num_unfinished >= max(UNFINISHED_UNTIL_TOLD, len(self._engine_keys)):
            self._listener.link_failed(_what_failed(event, value, bool(self._engine_keys)))
            delay = RETRY_AFTER_REFUSAL_SECONDS
        else:
            delay = 0.0
        if self._socket is not None and (is_final or len(self._engine_keys) > 1):
            # An engine closes the connection, and says no more, where it is taken for one with another key.
            self._close(linger_ms=0)
            self._key_index = (self._key_index + 1) % max(1, len(self._engine_keys))
            self._retry = self._loop.call_later(delay, self.reset)


def _what_failed(event: int, value: int, is_encrypted: bool) -> str:
    """For people. Of what the engine found wrong, libzmq tells this side little; the engine's log has it."""
    if event == zmq.Event.HANDSHAKE_FAILED_AUTH:
        return "it does not let this frontend's key in: frontend.public in the engine's --link-keys must hold it"
    if event == zmq.Event.HANDSHAKE_FAILED_PROTOCOL:
        if value == _MECHANISM_MISMATCH:
            this, that = ("encrypted", "not") if is_encrypted else ("not encrypted", "encrypted")
            return (
                f"this side of the link is {this}, and the engine's is {that}: give --link-keys to both or to neither"
            )
        return f"what answers there does not speak the link's protocol ({value:#x})"
    if is_encrypted:
        return (
            "the connection was closed in the handshake; unless the engine just ended, it has another key than "
            "engine.public in --link-keys says, or its link is not encrypted"
        )
    return "the connection was closed in the handshake; unless the engine just ended, its link may be encrypted"
