"""The watch on EndpointSlices against an API server that misses events, forgets, refuses and drops connections."""

import asyncio
import contextlib
import logging
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_fleet import Fleet
from fake_kubernetes import NAMESPACE, SERVICE, FakeKubernetes, endpoint

from services.frontend.engines.discovery import KubernetesDiscovery, discovery_for
from services.frontend.engines.discovery import kubernetes as module
from services.frontend.settings import EnginePoolSettings


@pytest.fixture
def api() -> Iterator[FakeKubernetes]:
    fake = FakeKubernetes()
    yield fake
    fake.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_RETRY_SECONDS", 0.05)
    monkeypatch.setattr(module, "SHORTEST_ROUND_SECONDS", 0.05)


class Found:
    """What the discovery has said, and a way to wait for it."""

    def __init__(self) -> None:
        self.calls: list[set[str]] = []
        self.threads: set[int] = set()
        self._changed = asyncio.Condition()

    def __call__(self, addresses: set[str]) -> None:
        self.calls.append(addresses)
        self.threads.add(threading.get_ident())

    async def until(self, *addresses: str) -> None:
        await until(lambda: bool(self.calls) and self.calls[-1] == set(addresses))


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def watching(api: FakeKubernetes, watch_seconds: float = 30.0, **options: Any) -> AsyncIterator[Found]:
    options = {"connect": api.api, **options}
    discovery = KubernetesDiscovery(SERVICE, NAMESPACE, "link", watch_seconds=watch_seconds, **options)
    found = Found()
    task = asyncio.create_task(discovery.watch(found))
    try:
        yield found
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def test_engines_are_listed_and_then_watched(api: FakeKubernetes) -> None:
    async def main() -> None:
        api.put("a", endpoint("10.0.0.1"), endpoint("10.0.0.2"))
        async with watching(api) as found:
            await found.until("10.0.0.1:5555", "10.0.0.2:5555")
            await until(lambda: api.watches == 1)
            api.put("b", endpoint("fd00::1"), addressType="IPv6")
            await found.until("10.0.0.1:5555", "10.0.0.2:5555", "[fd00::1]:5555")
            api.put("a", endpoint("10.0.0.2"))
            await found.until("10.0.0.2:5555", "[fd00::1]:5555")
            api.delete("b")
            await found.until("10.0.0.2:5555")
            assert found.threads == {threading.get_ident()}
        assert api.queries[0]["labelSelector"] == f"kubernetes.io/service-name={SERVICE}"
        assert (api.lists, api.watches) == (1, 1)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("conditions", "used"),
    [
        ({}, True),
        ({"ready": None, "serving": None, "terminating": None}, True),
        ({"ready": True, "serving": True, "terminating": False}, True),
        ({"ready": False, "serving": False, "terminating": False}, False),
        ({"ready": False, "serving": True, "terminating": True}, False),
        # A Service that publishes addresses that are not ready says ready of all.
        ({"ready": True, "serving": True, "terminating": True}, False),
    ],
)
def test_new_requests_go_to_what_is_ready_and_does_not_terminate(
    api: FakeKubernetes, conditions: dict[str, bool | None], used: bool
) -> None:
    async def main() -> None:
        api.put("a", endpoint("10.0.0.1"), endpoint("10.0.0.2", **conditions))
        async with watching(api) as found:
            await found.until("10.0.0.1:5555", *(["10.0.0.2:5555"] if used else []))

    asyncio.run(main())


def test_a_slice_without_the_port_is_left_out_and_named_in_the_log(
    api: FakeKubernetes, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        api.put("a", endpoint("10.0.0.1"))
        api.put("b", endpoint("10.0.0.2"), ports=[{"name": "other", "port": 1}])
        api.put("c", endpoint("example.org"), addressType="FQDN")
        async with watching(api) as found:
            await found.until("10.0.0.1:5555")
        assert caplog.text.count("EndpointSlice b has no port named 'link'") == 1

    asyncio.run(main())


def test_a_deletion_that_was_missed_is_found_by_the_next_list(api: FakeKubernetes) -> None:
    async def main() -> None:
        api.put("a", endpoint("10.0.0.1"))
        api.put("b", endpoint("10.0.0.2"))
        async with watching(api, watch_seconds=1.0) as found:
            await found.until("10.0.0.1:5555", "10.0.0.2:5555")
            await until(lambda: api.watches == 1)
            api.delete("b", silently=True)
            await found.until("10.0.0.1:5555")
            assert api.lists >= 2

    asyncio.run(main())


def test_a_version_that_is_gone_leads_to_a_new_list_and_not_to_a_storm_of_them(api: FakeKubernetes) -> None:
    async def main() -> None:
        api.put("a", endpoint("10.0.0.1"))
        api.is_gone = True
        async with watching(api) as found:
            await found.until("10.0.0.1:5555")
            await until(lambda: api.lists >= 2)
            api.put("a", endpoint("10.0.0.9"), silently=True)
            await found.until("10.0.0.9:5555")
            assert api.lists < 10
            api.is_gone = False
            watches = api.watches
            await until(lambda: api.watches > watches)
            api.put("a", endpoint("10.0.0.3"))
            await found.until("10.0.0.3:5555")

    asyncio.run(main())


def test_a_watch_whose_connection_breaks_is_made_anew_and_nothing_known_is_lost(api: FakeKubernetes) -> None:
    async def main() -> None:
        api.put("a", endpoint("10.0.0.1"))
        async with watching(api) as found:
            await found.until("10.0.0.1:5555")
            for number in range(2, 6):
                await until(lambda number=number: api.watches == number - 1)
                api.cut_watches()
                api.put("a", endpoint(f"10.0.0.{number}"), silently=number % 2 == 0)
                await found.until(f"10.0.0.{number}:5555")
            assert set() not in found.calls

    asyncio.run(main())


def test_an_api_that_refuses_is_asked_again_and_says_what_is_missing(
    api: FakeKubernetes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    async def main() -> None:
        api.put("a", endpoint("10.0.0.1"))
        api.fails_with = 403
        async with watching(api) as found:
            await until(lambda: len(api.queries) >= 3)
            assert found.calls == []
            api.fails_with = None
            await found.until("10.0.0.1:5555")
            await until(lambda: api.watches == 1)
            api.fails_with = 500
            api.cut_watches()
            queries = len(api.queries)
            await until(lambda: len(api.queries) >= queries + 3)
            assert found.calls[-1] == {"10.0.0.1:5555"}
        assert "needs a Role that may get, list and watch endpointslices" in caplog.text
        assert caplog.text.count("cannot watch the EndpointSlices") <= 3
        assert "the Kubernetes API answers again" in caplog.text

    asyncio.run(main())


def test_a_server_that_is_not_there_yet_is_found_later(api: FakeKubernetes) -> None:
    calls = 0

    def connect() -> Any:
        nonlocal calls
        calls += 1
        if calls < 3:
            raise ConnectionRefusedError("not yet")
        return api.api()

    async def main() -> None:
        api.put("a", endpoint("10.0.0.1"))
        async with watching(api, connect=connect) as found:
            await found.until("10.0.0.1:5555")

    asyncio.run(main())


def test_the_death_of_the_thread_is_noticed_and_the_pool_watches_anew(
    api: FakeKubernetes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    deaths = 0

    def connect() -> Any:
        nonlocal deaths
        if not deaths:
            deaths += 1
            raise SystemExit("a bug in a library")
        return api.api()

    monkeypatch.setattr("services.frontend.engines.pool._RESTART_DELAY", 0.01)

    async def main() -> None:
        fleet = Fleet(2)
        api.put("a", endpoint("10.0.0.0"), endpoint("10.0.0.1"))
        fleet.pool._discovery = KubernetesDiscovery(SERVICE, NAMESPACE, "link", connect=connect)
        await fleet.pool.start()
        await until(lambda: len(fleet.pool.connections) == 2 and fleet.pool.ready)
        assert "the search for engines of model model failed; it is started again" in caplog.text
        await fleet.pool.stop()

    asyncio.run(main())


def test_an_endpoint_that_terminates_gets_nothing_new_and_its_streams_end_where_they_run(api: FakeKubernetes) -> None:
    async def main() -> None:
        fleet = Fleet(2)
        api.put("a", endpoint("10.0.0.0"), endpoint("10.0.0.1"))
        fleet.pool._discovery = KubernetesDiscovery(SERVICE, NAMESPACE, "link", connect=api.api)
        await fleet.pool.start()
        await until(lambda: len(fleet.pool.connections) == 2 and len(fleet.pool._dispatcher.engines) == 2)
        first, second = (fleet.submit(max_tokens=4)[0] for _ in range(2))
        leaving, staying = fleet.engine_with(first), fleet.engine_with(second)
        api.put("a", endpoint(staying.split(":")[0]), endpoint(leaving.split(":")[0], ready=True, terminating=True))
        await until(lambda: len(fleet.pool._dispatcher.engines) == 1)
        assert fleet.engine_with(first) == leaving
        assert {fleet.engine_with(fleet.submit()[0]) for _ in range(4)} == {staying}
        await fleet.run_to_the_end()
        await until(lambda: set(fleet.pool.connections) == {staying})
        assert fleet.pool.counts.failovers == fleet.pool.counts.handovers == 0
        fleet.assert_clean()
        await fleet.pool.stop()

    asyncio.run(main())


def test_the_namespace_is_the_pods_own_unless_it_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "NAMESPACE_FILE", tmp_path / "namespace")
    settings = EnginePoolSettings(discovery="kubernetes", engine_service=SERVICE)
    with pytest.raises(ValueError, match="set engine_namespace, or mount the service account's token"):
        discovery_for(settings, 1.0)
    (tmp_path / "namespace").write_text("models\n")
    discovery = discovery_for(settings, 1.0)
    assert isinstance(discovery, KubernetesDiscovery)
    assert (discovery.namespace, discovery.port_name) == ("models", "link")
    with pytest.raises(ValueError, match="needs engine_service"):
        discovery_for(EnginePoolSettings(discovery="kubernetes"), 1.0)


def test_the_client_library_is_imported_only_when_it_is_used() -> None:
    code = "import services.frontend.main, sys; sys.exit('kubernetes' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
