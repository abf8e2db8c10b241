"""Engines behind a Kubernetes Service: a watch on its EndpointSlices, in a thread of its own.

Faster than DNS, which is cached on the way, and exact about pods that end. The thread lists, then watches for a minute,
and lists again, so that no event that was missed is missed for long. `kubernetes` is imported when it is first used.
"""

import asyncio
import logging
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from services.frontend.engines.discovery.names import join_address

logger = logging.getLogger(__name__)

NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
SERVICE_LABEL = "kubernetes.io/service-name"
# A watch ends after so long, spread so that frontends do not all list at once.
WATCH_SECONDS = 60.0
# Above the watch's own time: longer silence is a connection that is gone without notice.
READ_MARGIN_SECONDS = 10.0
CONNECT_SECONDS = 5.0
SHORTEST_ROUND_SECONDS = 1.0
FIRST_RETRY_SECONDS = 0.5
MAX_RETRY_SECONDS = 15.0
HTTP_FORBIDDEN = 403
HTTP_GONE = 410


def connect_to_api() -> Any:
    """DiscoveryV1Api with the pod's service account, or what kubectl would use. Raises kubernetes' ConfigException."""
    from kubernetes import client, config

    configuration = client.Configuration()
    try:
        config.load_incluster_config(client_configuration=configuration)
    except config.ConfigException:
        config.load_kube_config(client_configuration=configuration)
    # Retries are made here.
    configuration.retries = False
    return client.DiscoveryV1Api(client.ApiClient(configuration))


def own_namespace() -> str:
    """The namespace of this pod. Raises ValueError outside of one."""
    try:
        return NAMESPACE_FILE.read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ValueError(
            f"discovery kubernetes: {NAMESPACE_FILE} cannot be read ({error.strerror}); set engine_namespace, or mount "
            "the service account's token"
        ) from error


class KubernetesDiscovery:
    """The engines of one Service. Raises ValueError where the Service or its namespace is not known."""

    def __init__(
        self,
        service: str,
        namespace: str,
        port_name: str,
        connect: Callable[[], Any] = connect_to_api,
        watch_seconds: float = WATCH_SECONDS,
    ) -> None:
        if not service:
            raise ValueError("discovery kubernetes needs engine_service, the name of the engines' Service")
        self.service = service
        self.namespace = namespace or own_namespace()
        self.port_name = port_name
        self.connect = connect
        self.watch_seconds = watch_seconds

    async def watch(self, found: Callable[[set[str]], None]) -> None:
        """See `Discovery`. Raises RuntimeError where the thread has died; the caller then watches anew."""
        loop = asyncio.get_running_loop()
        ended = loop.create_future()
        stop = threading.Event()

        def tell(addresses: set[str]) -> None:
            if not stop.is_set():
                found(addresses)

        def end(error: BaseException) -> None:
            if not ended.done():
                ended.set_exception(RuntimeError(f"the watch on EndpointSlices ended: {error!r}"))

        def run() -> None:
            try:
                _Watcher(self, stop, lambda addresses: loop.call_soon_threadsafe(tell, addresses)).run()
            except BaseException as error:
                if not stop.is_set():
                    loop.call_soon_threadsafe(end, error)

        # A daemon: it may be reading when the process ends, and reads for a minute at most once it is stopped.
        threading.Thread(target=run, name="endpoint-slices", daemon=True).start()
        try:
            await ended
        finally:
            stop.set()


class _Watcher:
    """What the thread knows and does."""

    def __init__(
        self, discovery: KubernetesDiscovery, stop: threading.Event, tell: Callable[[set[str]], object]
    ) -> None:
        self._discovery = discovery
        self._stop = stop
        self._tell = tell
        self._api: Any = None
        self._slices: dict[str, Any] = {}
        self._told: set[str] | None = None
        self._failures = 0
        self._last_status: int | None = None
        self._without_port: set[str] = set()

    def run(self) -> None:
        while not self._stop.is_set():
            began = time.monotonic()
            try:
                self._list_and_watch()
                # Whatever ends the watch at once must not make this list without a pause.
                self._stop.wait(max(0.0, SHORTEST_ROUND_SECONDS - (time.monotonic() - began)))
            except Exception as error:
                self._stop.wait(self._retry_after(error))

    def _list_and_watch(self) -> None:
        from kubernetes import watch

        discovery = self._discovery
        if self._api is None:
            self._api = discovery.connect()
        timeout = (CONNECT_SECONDS, discovery.watch_seconds + READ_MARGIN_SECONDS)
        query = {
            "namespace": discovery.namespace,
            "label_selector": f"{SERVICE_LABEL}={discovery.service}",
            "_request_timeout": timeout,
        }
        listed = self._api.list_namespaced_endpoint_slice(**query)
        if self._failures:
            logger.info("the Kubernetes API answers again")
        self._slices = {each.metadata.name: each for each in listed.items}
        self._publish()
        seconds = max(1, round(discovery.watch_seconds * random.uniform(0.75, 1.0)))
        events: Any = watch.Watch().stream(
            self._api.list_namespaced_endpoint_slice,
            resource_version=listed.metadata.resource_version,
            timeout_seconds=seconds,
            **query,
        )
        for event in events:
            self._failures = 0
            if self._stop.is_set():
                return
            if event["type"] in ("ADDED", "MODIFIED"):
                self._slices[event["object"].metadata.name] = event["object"]
            elif event["type"] == "DELETED":
                self._slices.pop(event["object"].metadata.name, None)
            self._publish()
        self._failures = 0

    def _publish(self) -> None:
        addresses = {address for each in self._slices.values() for address in self._addresses(each)}
        if addresses != self._told:
            self._told = addresses
            self._tell(set(addresses))

    def _addresses(self, endpoint_slice: Any) -> set[str]:
        """Where new requests may go: what is not ready or terminates is left out, and its streams run to their end.

        A condition that is not set counts as the API's documentation says: ready, not terminating."""
        if endpoint_slice.address_type not in ("IPv4", "IPv6"):
            return set()
        port = next((each.port for each in endpoint_slice.ports or [] if each.name == self._discovery.port_name), None)
        if port is None:
            self._warn_of_port(endpoint_slice)
            return set()
        addresses: set[str] = set()
        for endpoint in endpoint_slice.endpoints or []:
            conditions = endpoint.conditions
            ready = conditions is None or conditions.ready is not False
            terminating = conditions is not None and conditions.terminating is True
            if ready and not terminating:
                # All addresses of one endpoint lead to the same pod.
                addresses.update(join_address(address, port) for address in endpoint.addresses[:1])
        return addresses

    def _warn_of_port(self, endpoint_slice: Any) -> None:
        if endpoint_slice.endpoints and endpoint_slice.metadata.name not in self._without_port:
            self._without_port = (self._without_port & self._slices.keys()) | {endpoint_slice.metadata.name}
            logger.error(
                "EndpointSlice %s has no port named %r, so its engines are not found: name the port of Service %s so, "
                "or set engine_port_name",
                endpoint_slice.metadata.name,
                self._discovery.port_name,
                self._discovery.service,
            )

    def _retry_after(self, error: Exception) -> float:
        """Seconds to wait after a failure; what is known stays. A failure that goes on is logged once."""
        status = getattr(error, "status", None)
        self._failures += 1
        if status == HTTP_GONE and self._failures == 1:
            logger.info("the watch on EndpointSlices was too far behind; listing anew")
            return 0.0
        if self._failures == 1 or status != self._last_status:
            discovery = self._discovery
            hint = ""
            if status == HTTP_FORBIDDEN:
                hint = (
                    "; the service account needs a Role that may get, list and watch endpointslices of the group "
                    + ("discovery.k8s.io")
                )
            logger.warning(
                "cannot watch the EndpointSlices of Service %s/%s: %s%s; %d engines stay known (trying on)",
                discovery.namespace,
                discovery.service,
                f"{status} {getattr(error, 'reason', '')}" if status else " ".join(str(error).split())[:300],
                hint,
                len(self._told or ()),
            )
        self._last_status = status
        delay = min(MAX_RETRY_SECONDS, FIRST_RETRY_SECONDS * 2 ** min(self._failures - 1, 10))
        return delay * random.uniform(0.5, 1.0)
