"""Streams through a fleet whose engines are killed, frozen, drained and cut off, again and again.

What each stream must say is a function of its prompt and seed: an undisturbed run tells it. A short form runs with
every test; `make chaos` runs a hundred disturbances (TANDEM_CHAOS_DISTURBANCES, TANDEM_CHAOS_SEED).
"""

import asyncio
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
from process_fleet import HEARTBEAT_TIMEOUT, Engine, ProcessFleet
from streamed_answer import StreamedAnswer, stream

DISTURBANCES = int(os.environ.get("TANDEM_CHAOS_DISTURBANCES", "8"))
SEED = int(os.environ.get("TANDEM_CHAOS_SEED", "1"))
STREAMS = 50
NUM_ENGINES = 3
# A connection that is cut may be back before anyone has looked; this is many times what noticing takes.
SETTLE_SECONDS = 0.3


def make_bodies(rng: random.Random) -> list[dict[str, Any]]:
    return [
        {
            "prompt": [rng.randrange(100, 40_000) for _ in range(rng.choice([1, rng.randint(2, 40), 200]))],
            "max_tokens": rng.randint(30, 150),
            "seed": rng.randrange(2**31),
        }
        for _ in range(STREAMS)
    ]


class Disturber:
    """Disturbs one or two engines at a time, and waits until the fleet is whole again: with no engine at all, new
    requests are rightly refused."""

    def __init__(self, fleet: ProcessFleet, rng: random.Random) -> None:
        self.counts: Counter[str] = Counter()
        self._fleet = fleet
        self._rng = rng

    async def run(self, disturbances: int) -> None:
        while self.counts.total() < disturbances:
            victims = self._rng.sample(range(NUM_ENGINES), self._rng.choice([1, 2]))
            async with asyncio.TaskGroup() as round_:
                for victim in victims:
                    kind = self._rng.choice(["kill", "freeze", "drain", "cut", "swallow"])
                    delay, length = self._rng.uniform(0, 0.5), self._rng.uniform(0.1, 1.7 * HEARTBEAT_TIMEOUT)
                    self.counts[kind] += 1
                    round_.create_task(self._disturb(kind, victim, delay, length))
            await asyncio.sleep(SETTLE_SECONDS)
            await asyncio.to_thread(self._fleet.wait_connected)

    async def _disturb(self, kind: str, victim: int, delay: float, length: float) -> None:
        engine = self._fleet.engines[victim]
        links = [links[victim] for links in self._fleet.links]
        await asyncio.sleep(delay)
        if kind == "kill":
            engine.kill()
            await self._start(engine)
        elif kind == "freeze":
            engine.send(signal.SIGSTOP)
            await asyncio.sleep(length)
            engine.send(signal.SIGCONT)
        elif kind == "drain":
            engine.send(signal.SIGTERM)
            assert await asyncio.to_thread(engine.wait) == 0, engine.log[-4000:]
            await self._start(engine)
        elif kind == "cut":
            for link in self._rng.sample(links, self._rng.randint(1, len(links))):
                link.cut()
        else:
            cut_off = self._rng.sample(links, self._rng.randint(1, len(links)))
            for link in cut_off:
                link.swallow()
            await asyncio.sleep(length)
            for link in cut_off:
                link.heal()

    async def _start(self, engine: Engine) -> None:
        engine.start()
        deadline = time.monotonic() + 60
        while not engine.is_up:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)


async def run_streams_while_disturbed(
    fleet: ProcessFleet, bodies: list[dict[str, Any]], expected: list[StreamedAnswer], disturber: Disturber
) -> int:
    """How many streams ran. Fails at the first that is not as expected."""
    rng = random.Random(SEED)
    over = asyncio.Event()
    finished = 0

    async def client() -> None:
        nonlocal finished
        while not over.is_set():
            choice = rng.randrange(len(bodies))
            answer = await stream(rng.choice(fleet.frontends).port, bodies[choice])
            assert answer.complete, answer.describe()
            assert answer.text == expected[choice].text
            assert usage_without_cache(answer) == usage_without_cache(expected[choice])
            finished += 1

    async with asyncio.TaskGroup() as clients:
        for _ in range(STREAMS):
            clients.create_task(client())
        await disturber.run(DISTURBANCES)
        over.set()
    return finished


def usage_without_cache(answer: StreamedAnswer) -> dict[str, Any]:
    assert answer.usage is not None
    return {name: answer.usage[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}


def test_streams_survive_whatever_befalls_their_engines(smollm2: Path, tmp_path: Path) -> None:
    fleet = ProcessFleet(
        tmp_path,
        smollm2,
        num_frontends=2,
        num_engines=NUM_ENGINES,
        engine={"shutdown_grace": 0.5},
        # Here an engine is lost every other second: no stream is to end for having met too many of those.
        frontend={"max_failovers": 50},
    )
    bodies = make_bodies(random.Random(SEED))
    disturber = Disturber(fleet, random.Random(SEED))

    async def main() -> int:
        expected = await asyncio.gather(*(stream(fleet.frontends[0].port, body) for body in bodies))
        for answer, body in zip(expected, bodies, strict=True):
            assert answer.complete, answer.describe()
            assert answer.usage is not None
            assert answer.usage["completion_tokens"] == body["max_tokens"]
        return await run_streams_while_disturbed(fleet, bodies, expected, disturber)

    try:
        fleet.start()
        finished = asyncio.run(main())
        failovers, handovers = fleet.frontend_metric("failovers_total"), fleet.frontend_metric("handovers_total")
        print(f"\n{dict(disturber.counts)}: {finished} streams, {failovers:.0f} failovers, {handovers:.0f} hand-overs")
        assert finished >= STREAMS
        assert failovers > 0
        assert fleet.frontend_metric("given_up_total") == 0
        fleet.assert_nothing_left()
    finally:
        fleet.close()
    assert [member.wait() for member in fleet.members] == [0] * len(fleet.members)
    assert [
        child
        for child in psutil.Process().children(recursive=True)
        if any("services.command" in word for word in child.cmdline())
    ] == []
