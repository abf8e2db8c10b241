"""The engine's small HTTP port for Kubernetes and Prometheus: /health/live, /health/ready, /metrics.

It answers from threads of its own, so that it also answers while the model loads or a step hangs.
"""

import logging
import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

logger = logging.getLogger(__name__)

SOCKET_TIMEOUT = 10.0

# Each connection is a thread of the engine's process, and probes and scrapers have a few. One more is closed at once.
MAX_CONNECTIONS = 32

# Why it is not alive, or not ready; None where it is.
Verdict = Callable[[], str | None]
# The metrics in the format that an Accept header asks for, and their content type.
Exposition = Callable[[str], tuple[bytes, str]]


class ProbesBindError(Exception):
    """The port cannot be bound. The message says which and why."""


class Probes:
    """Binds in the constructor, answers from `start` on."""

    def __init__(self, host: str, port: int, unhealthy: Verdict, not_ready: Verdict, exposition: Exposition) -> None:
        class Handler(_Handler):
            answers = {  # noqa: RUF012
                "/health/live": lambda accept: _answer_health(unhealthy()),
                "/health/ready": lambda accept: _answer_health(not_ready()),
                "/metrics": lambda accept: (200, *exposition(accept)),
            }

        class Server(_BoundedServer):
            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

        try:
            self._server = Server((host, port), Handler)
        except (OSError, OverflowError) as error:
            raise ProbesBindError(
                f"The probes' port {port} on {host} cannot be bound: {error}. "
                "Choose others with --probe-host and --probe-port (0 takes a free port)."
            ) from error
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, name="probes", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        if self._thread.is_alive():
            self._server.shutdown()
        self._server.server_close()


def _answer_health(trouble: str | None) -> tuple[int, bytes, str]:
    return (200, b"ok\n", "text/plain") if trouble is None else (503, f"{trouble}\n".encode(), "text/plain")


class _BoundedServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._is_full = False
        self._places = threading.BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._places.acquire(blocking=False):
            self._is_full = False
            super().process_request(request, client_address)
            return
        if not self._is_full:
            self._is_full = True
            logger.warning("probes: there are already %d connections; further ones are refused", MAX_CONNECTIONS)
        self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        # A client that hangs up, mostly. The base class prints a traceback for each.
        logger.debug("probes: a connection failed", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    answers: dict[str, Callable[[str], tuple[int, bytes, str]]]
    protocol_version = "HTTP/1.1"
    timeout = SOCKET_TIMEOUT

    def do_GET(self) -> None:
        answer = self.answers.get(self.path.partition("?")[0])
        accept = self.headers.get("Accept", "")
        status, body, content_type = answer(accept) if answer else (404, b"not found\n", "text/plain")
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def do_HEAD(self) -> None:
        self.do_GET()

    def log_message(self, format: str, *args: object) -> None:
        logger.debug("probes: " + format, *args)
