"""Where engines are: names that change, that fail, that have several addresses; static lists."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from services.frontend.engines.discovery import DnsDiscovery, StaticDiscovery, discovery_for
from services.frontend.engines.discovery.names import Name, resolve, split_address
from services.frontend.settings import EnginePoolSettings


def answering(*answers: list[str] | OSError) -> Callable[[str, int], Awaitable[list[str]]]:
    """A look-up that gives one answer after the other, and then the last for ever."""
    left = list(answers)

    async def look_up(host: str, port: int) -> list[str]:
        answer = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(answer, OSError):
            raise answer
        return answer

    return look_up


async def first_finds(discovery: DnsDiscovery | StaticDiscovery, count: int) -> list[set[str]]:
    finds: list[set[str]] = []
    enough = asyncio.Event()

    def found(addresses: set[str]) -> None:
        finds.append(addresses)
        if len(finds) >= count:
            enough.set()

    task = asyncio.create_task(discovery.watch(found))
    await asyncio.wait_for(enough.wait(), 5)
    task.cancel()
    return finds


def test_dns_tells_of_every_change_and_of_nothing_else() -> None:
    look_up = answering(["a:1"], ["a:1"], ["b:1", "a:1"], ["a:1", "b:1"], ["b:1"])
    finds = asyncio.run(first_finds(DnsDiscovery(["engines:1"], 0.001, look_up), 3))
    assert finds == [{"a:1"}, {"a:1", "b:1"}, {"b:1"}]


def test_a_failed_look_up_keeps_what_is_known(caplog: pytest.LogCaptureFixture) -> None:
    failure = OSError("Name or service not known")
    look_up = answering(["a:1"], failure, failure, [], ["b:1"])
    finds = asyncio.run(first_finds(DnsDiscovery(["engines:1"], 0.001, look_up), 2))
    assert finds == [{"a:1"}, {"b:1"}]
    assert caplog.text.count("cannot look up engines: Name or service not known; still using a:1") == 1


def test_one_name_that_fails_does_not_disturb_another() -> None:
    async def look_up(host: str, port: int) -> list[str]:
        if host == "bad":
            raise OSError("no")
        return [f"{host}:{port}"]

    finds = asyncio.run(first_finds(DnsDiscovery(["bad:1", "good:2"], 0.001, look_up), 1))
    assert finds == [{"good:2"}]


def test_static_takes_addresses_as_they_are() -> None:
    finds = asyncio.run(first_finds(StaticDiscovery(["10.0.0.1:5", "[fd00::1]:6"], 0.001), 1))
    assert finds == [{"10.0.0.1:5", "[fd00::1]:6"}]


def test_a_static_name_is_one_engine_and_moves_only_when_its_address_is_gone() -> None:
    look_up = answering(["a:1", "b:1"], ["b:1", "a:1"], ["c:1"])
    finds = asyncio.run(first_finds(StaticDiscovery(["engine-0:1"], 0.001, look_up), 3))
    assert finds == [set(), {"a:1"}, {"c:1"}]


def test_names_resolve_to_numbers_ipv4_first() -> None:
    async def main() -> None:
        assert (await resolve("localhost", 5555))[0] == "127.0.0.1:5555"
        assert await Name("127.0.0.1:1").look_up() == ["127.0.0.1:1"]
        assert await Name(f"{'x' * 300}.invalid:1").look_up() == []

    asyncio.run(main())


@pytest.mark.parametrize(
    "address",
    ["", "host", "host:", ":5555", "host:port", "host:0", "host:65536", "::1:5555", "fd00::1", "host:٣", "a:-1"],
)
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="engine address"):
        split_address(address)


def test_addresses_split() -> None:
    assert split_address("host:1") == ("host", 1)
    assert split_address("[fd00::1]:2") == ("fd00::1", 2)


def test_the_setting_chooses() -> None:
    assert isinstance(discovery_for(EnginePoolSettings(discovery="dns", engine_addresses=["e:1"]), 1), DnsDiscovery)
    assert isinstance(discovery_for(EnginePoolSettings(), 1), StaticDiscovery)
