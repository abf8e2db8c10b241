"""A Kubernetes API server that knows EndpointSlices only, lists and watches them, and fails when it is told to."""

import functools
import json
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from kubernetes import client

NAMESPACE = "models"
SERVICE = "engines"


def endpoint(address: str, **conditions: bool | None) -> dict[str, Any]:
    return {"addresses": [address], "conditions": conditions}


class FakeKubernetes:
    """One namespace's EndpointSlices. Close it in the end."""

    def __init__(self) -> None:
        self.lists = self.watches = 0
        self.queries: list[dict[str, str]] = []
        self.fails_with: int | None = None  # an HTTP status for every request
        self.is_gone = False  # watches find their resource version too old
        self._changed = threading.Condition()
        self._version = 100
        self._slices: dict[str, dict[str, Any]] = {}
        self._events: list[tuple[int, bytes]] = []
        self._cuts = 0  # a watch that began before the last one ends without a word
        self._closed = False
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                fake._answer(self)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._server.shutdown()
        self._server.server_close()

    def api(self) -> client.DiscoveryV1Api:
        configuration = client.Configuration(host=f"http://127.0.0.1:{self._server.server_port}")
        configuration.retries = False
        return client.DiscoveryV1Api(client.ApiClient(configuration))

    def put(self, name: str, *endpoints: dict[str, Any], silently: bool = False, **fields: Any) -> None:
        """Make or change a slice; `silently`, its event is lost."""
        content = {
            "metadata": {"name": name, "namespace": NAMESPACE, "labels": {"kubernetes.io/service-name": SERVICE}},
            "addressType": "IPv4",
            "ports": [{"name": "metrics", "port": 8001}, {"name": "link", "port": 5555}],
            "endpoints": list(endpoints),
            **fields,
        }
        kind = "MODIFIED" if name in self._slices else "ADDED"
        self._slices[name] = content
        self._tell(kind, content, silently)

    def delete(self, name: str, silently: bool = False) -> None:
        self._tell("DELETED", self._slices.pop(name), silently)

    def cut_watches(self) -> None:
        with self._changed:
            self._cuts += 1
            self._changed.notify_all()

    def _tell(self, kind: str, content: dict[str, Any], silently: bool) -> None:
        with self._changed:
            self._version += 1
            content["metadata"]["resourceVersion"] = str(self._version)
            if not silently:
                self._events.append((self._version, self._event(kind, content)))
            self._changed.notify_all()

    def _event(self, kind: str, content: dict[str, Any]) -> bytes:
        return json.dumps({"type": kind, "object": content}).encode() + b"\n"

    def _answer(self, handler: BaseHTTPRequestHandler) -> None:
        url = urllib.parse.urlsplit(handler.path)
        query = dict(urllib.parse.parse_qsl(url.query))
        self.queries.append(query)
        if self.fails_with is not None:
            self._send(handler, self.fails_with, {"kind": "Status", "message": "as it was told"})
        elif url.path != f"/apis/discovery.k8s.io/v1/namespaces/{NAMESPACE}/endpointslices":
            self._send(handler, 404, {"kind": "Status", "message": url.path})
        elif query.get("watch", "").lower() == "true":
            self.watches += 1
            self._watch(handler, int(query["resourceVersion"]), float(query["timeoutSeconds"]))
        else:
            self.lists += 1
            metadata = {"resourceVersion": str(self._version)}
            self._send(handler, 200, {"kind": "EndpointSliceList", "metadata": metadata, "items": self._items()})

    def _items(self) -> list[dict[str, Any]]:
        return list(self._slices.values())

    def _send(self, handler: BaseHTTPRequestHandler, status: int, content: dict[str, Any]) -> None:
        body = json.dumps(content).encode()
        handler.send_response(status)
        handler.send_header("content-type", "application/json")
        handler.send_header("content-length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)

    def _watch(self, handler: BaseHTTPRequestHandler, sent: int, seconds: float) -> None:
        handler.send_response(200)
        handler.send_header("content-type", "application/json")
        handler.send_header("transfer-encoding", "chunked")
        handler.end_headers()
        if self.is_gone:
            gone = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}
            self._chunk(handler, self._event("ERROR", gone))
            self._chunk(handler, b"")
            return
        cuts = self._cuts
        while True:
            with self._changed:
                woken = self._changed.wait_for(functools.partial(self._has_news, sent, cuts), seconds)
                if self._closed or self._cuts != cuts:
                    # Not even the end of the chunks: the connection is gone.
                    handler.close_connection = True
                    return
                due = [event for event in self._events if event[0] > sent]
            for version, event in due:
                self._chunk(handler, event)
                sent = version
            if not woken:
                self._chunk(handler, b"")
                return

    def _has_news(self, sent: int, cuts: int) -> bool:
        return self._closed or self._cuts != cuts or any(version > sent for version, _ in self._events)

    def _chunk(self, handler: BaseHTTPRequestHandler, data: bytes) -> None:
        handler.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        handler.wfile.flush()
