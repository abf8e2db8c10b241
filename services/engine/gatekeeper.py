"""Who may speak to the engine's link: CURVE on its socket, the answers to ZAP, and the handshakes that failed.

`router_socket` has one; `link` calls `attend` from its thread when one of `sockets` is readable.
"""

import logging
from collections.abc import Container

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from shared.link_keys import LinkKeys
from shared.rare_log import RareLog

logger = logging.getLogger(__name__)

# https://rfc.zeromq.org/spec/27: libzmq asks this address of its own context about every client.
ZAP_ADDRESS = "inproc://zeromq.zap.01"
ZAP_DOMAIN = b"tandem"
EVENTS_PER_PASS = 256

_FAILURES = zmq.Event.HANDSHAKE_FAILED_NO_DETAIL | zmq.Event.HANDSHAKE_FAILED_PROTOCOL | zmq.Event.HANDSHAKE_FAILED_AUTH
_CRYPTOGRAPHIC = int(zmq.Event.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC)
_MECHANISM_MISMATCH = int(zmq.Event.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH)

UNKNOWN_KEY = "unknown_key"
WRONG_ENGINE_KEY = "wrong_engine_key"
ENCRYPTION_MISMATCH = "encryption_mismatch"
PROTOCOL_ERROR = "protocol_error"
UNFINISHED = "unfinished"  # closed, or silent, before it was over: a scan of ports, a frontend that was killed


class Gatekeeper:
    """Made before `socket` is bound. With keys, only frontends with one of `keys.peers` get in, and nobody does
    should this object be gone. Counts, by reason, the connections that came to nothing."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], socket: zmq.Socket[bytes], keys: LinkKeys | None):
        reasons = (UNKNOWN_KEY, WRONG_ENGINE_KEY, ENCRYPTION_MISMATCH, PROTOCOL_ERROR, UNFINISHED)
        self.failures: dict[str, int] = dict.fromkeys(reasons, 0)
        self._rare_logs = {reason: RareLog(logger) for reason in reasons}
        self._monitor = socket.get_monitor_socket(_FAILURES)
        self.sockets: list[zmq.Socket[bytes]] = [self._monitor]
        self._is_encrypted = keys is not None
        if keys is not None:
            self._allowed: Container[bytes] = frozenset(z85.decode(key) for key in keys.peers)
            self._zap = context.socket(zmq.REP)
            self._zap.bind(ZAP_ADDRESS)
            self.sockets.append(self._zap)
            socket.set(zmq.CURVE_SERVER, 1)
            socket.set(zmq.CURVE_SECRETKEY, keys.secret)
            socket.set(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
            socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)
            logger.info("The link is encrypted; frontend keys that it lets in: %d", len(keys.peers))

    def attend(self, ready: Container[object]) -> None:
        """Answer whom libzmq asks about, and note what failed."""
        if self._monitor in ready:
            self._read_failures()
        if self._is_encrypted and self._zap in ready:
            self._answer()

    def _answer(self) -> None:
        for _ in range(EVENTS_PER_PASS):
            try:
                frames = self._zap.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            version, request_id, domain, address, _, mechanism, *credentials = frames
            is_allowed = mechanism == b"CURVE" and domain == ZAP_DOMAIN and credentials[0] in self._allowed
            status = (b"200", b"OK") if is_allowed else (b"400", b"unknown key")
            self._zap.send_multipart([version, request_id, *status, b"", b""])
            if not is_allowed:
                where = address.decode(errors="replace").removeprefix("::ffff:")
                self._note(
                    UNKNOWN_KEY,
                    f"A frontend at {where} was turned away: its key is not one of those "
                    "that --link-keys names (frontend.public, or derived from frontend.secret)",
                )

    def _read_failures(self) -> None:
        for _ in range(EVENTS_PER_PASS):
            try:
                event = parse_monitor_message(self._monitor.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            kind, value = event["event"], event["value"]
            if kind == zmq.Event.HANDSHAKE_FAILED_NO_DETAIL:
                self.failures[UNFINISHED] += 1
                logger.debug("A connection to the link ended before its handshake did")
            elif kind == zmq.Event.HANDSHAKE_FAILED_PROTOCOL and value == _CRYPTOGRAPHIC:
                self._note(
                    WRONG_ENGINE_KEY,
                    "A frontend was turned away: it takes this engine for one with another key. The key that it knows "
                    "(engine.public in its --link-keys) must be of the first line of this engine's engine.secret",
                )
            elif kind == zmq.Event.HANDSHAKE_FAILED_PROTOCOL and value == _MECHANISM_MISMATCH:
                this, that = ("encrypted", "not") if self._is_encrypted else ("not encrypted", "encrypted")
                self._note(
                    ENCRYPTION_MISMATCH,
                    f"A frontend was turned away: this link is {this}, and its is {that}. Give --link-keys to both "
                    "sides, or to neither",
                )
            elif kind == zmq.Event.HANDSHAKE_FAILED_PROTOCOL:
                self._note(PROTOCOL_ERROR, f"What connected to the link does not speak its language ({value:#x})")

    def _note(self, reason: str, message: str) -> None:
        self.failures[reason] += 1
        self._rare_logs[reason].log("%s", message)
