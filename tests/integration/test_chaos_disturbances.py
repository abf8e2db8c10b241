"""Streams through a fleet whose engines and frontends are killed, frozen, drained and cut off, again and again.

What each stream must say is a function of its prompt and seed: an undisturbed run tells it. A short form runs with
every test; `make chaos` runs a hundred disturbances (TANDEM_CHAOS_DISTURBANCES, TANDEM_CHAOS_SEED).
"""

import asyncio
import itertools
import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from process_fleet import HEARTBEAT_TIMEOUT, Frontend, Member, ProcessFleet
from streamed_answer import StreamedAnswer, stream

DISTURBANCES = int(os.environ.get("TANDEM_CHAOS_DISTURBANCES", "10"))
SEED = int(os.environ.get("TANDEM_CHAOS_SEED", "1"))
STREAMS = 50
NUM_ENGINES = 3
# A connection that is cut may be back before anyone has looked; this is many times what noticing takes.
SETTLE_SECONDS = 0.3
# From SIGTERM to the last new connection: the load balancer hears of it meanwhile.
DRAIN_DELAY = 0.5


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
    """Disturbs one or two engines at a time, and now and then a frontend, and waits until the fleet is whole again:
    with no engine at all, new requests are rightly refused. `listed` are the frontends that a load balancer would
    choose from, `killed` the processes whose clients may find their connections broken."""

    def __init__(self, fleet: ProcessFleet, rng: random.Random) -> None:
        self.counts: Counter[str] = Counter()
        self.moves: Counter[str] = Counter()
        self.listed = list(fleet.frontends)
        self.killed: set[subprocess.Popen[bytes]] = set()
        self._fleet = fleet
        self._rng = rng
        self._frontend_kinds = itertools.cycle(rng.sample(["kill", "freeze", "drain"], 3))

    async def run(self, disturbances: int) -> None:
        rng, every_other_round = self._rng, itertools.cycle([True, False])
        while self.counts.total() < disturbances:
            async with asyncio.TaskGroup() as round_:
                for victim in rng.sample(range(NUM_ENGINES), rng.choice([1, 2])):
                    kind = rng.choice(["kill", "freeze", "drain", "cut", "swallow"])
                    delay, length = rng.uniform(0, 0.5), rng.uniform(0.1, 1.7 * HEARTBEAT_TIMEOUT)
                    self.counts[kind] += 1
                    round_.create_task(self._disturb(kind, victim, delay, length))
                if next(every_other_round):
                    frontend, kind = rng.choice(self._fleet.frontends), next(self._frontend_kinds)
                    delay, length = rng.uniform(0, 0.5), rng.uniform(0.1, 1.7 * HEARTBEAT_TIMEOUT)
                    self.counts[f"{kind} a frontend"] += 1
                    round_.create_task(self._disturb_frontend(kind, frontend, delay, length))
            await asyncio.sleep(SETTLE_SECONDS)
            await asyncio.to_thread(self._fleet.wait_connected)
            self.listed = list(self._fleet.frontends)

    def count_moves(self, frontend: Frontend) -> None:
        """What it counted goes with it."""
        for name in ("failovers", "handovers", "given_up"):
            self.moves[name] += int(frontend.metric(f"{name}_total"))

    async def _disturb(self, kind: str, victim: int, delay: float, length: float) -> None:
        engine = self._fleet.engines[victim]
        links = [links[victim] for links in self._fleet.links]
        await asyncio.sleep(delay)
        if kind == "kill":
            engine.kill()
            await self._start(engine)
        elif kind == "freeze":
            await self._freeze(engine, length)
        elif kind == "drain":
            await self._drain(engine)
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

    async def _disturb_frontend(self, kind: str, frontend: Frontend, delay: float, length: float) -> None:
        await asyncio.sleep(delay)
        if kind == "kill":
            await asyncio.to_thread(self.count_moves, frontend)
            assert frontend.process is not None
            self.killed.add(frontend.process)
            self.listed.remove(frontend)
            frontend.kill()
            await self._start(frontend)
        elif kind == "freeze":
            # Its streams wait and go on. New ones it would refuse as it thaws, until an engine knows it again.
            self.listed.remove(frontend)
            await asyncio.sleep(DRAIN_DELAY / 4)
            await self._freeze(frontend, length)
        else:
            await asyncio.to_thread(self.count_moves, frontend)
            await self._drain(frontend, lambda: self.listed.remove(frontend))

    async def _freeze(self, member: Member, seconds: float) -> None:
        member.send(signal.SIGSTOP)
        await asyncio.sleep(seconds)
        member.send(signal.SIGCONT)

    async def _drain(self, member: Member, unlist: Callable[[], None] = lambda: None) -> None:
        member.send(signal.SIGTERM)
        await asyncio.sleep(DRAIN_DELAY / 4)
        unlist()
        assert await asyncio.to_thread(member.wait) == 0, member.log[-4000:]
        await self._start(member)

    async def _start(self, member: Member) -> None:
        member.start()
        deadline = time.monotonic() + 60
        while not member.is_up:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)


async def run_streams_while_disturbed(
    bodies: list[dict[str, Any]], expected: list[StreamedAnswer], disturber: Disturber
) -> int:
    """How many streams ran to their end. Fails at the first that is not as expected: only those of a frontend that is
    killed may break, and then they are asked for again."""
    rng = random.Random(SEED)
    over = asyncio.Event()
    finished = 0

    async def client() -> None:
        nonlocal finished
        while not over.is_set():
            choice = rng.randrange(len(bodies))
            frontend = rng.choice(disturber.listed)
            process = frontend.process
            answer = await stream(frontend.port, bodies[choice])
            if not answer.complete and process in disturber.killed:
                assert answer.error is None, answer.describe()
                assert expected[choice].text.startswith(answer.text)
                continue
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


def test_streams_survive_whatever_befalls_their_engines_and_other_frontends(smollm2: Path, tmp_path: Path) -> None:
    fleet = ProcessFleet(
        tmp_path,
        smollm2,
        num_frontends=2,
        num_engines=NUM_ENGINES,
        engine={"shutdown_grace": 0.5},
        # Here an engine is lost every other second: no stream is to end for having met too many of those.
        frontend={"max_failovers": 50, "drain_delay": DRAIN_DELAY},
    )
    bodies = make_bodies(random.Random(SEED))
    disturber = Disturber(fleet, random.Random(SEED))

    async def main() -> int:
        expected = await asyncio.gather(*(stream(fleet.frontends[0].port, body) for body in bodies))
        for answer, body in zip(expected, bodies, strict=True):
            assert answer.complete, answer.describe()
            assert answer.usage is not None
            assert answer.usage["completion_tokens"] == body["max_tokens"]
        return await run_streams_while_disturbed(bodies, expected, disturber)

    try:
        fleet.start()
        finished = asyncio.run(main())
        for frontend in fleet.frontends:
            disturber.count_moves(frontend)
        print(f"\n{dict(disturber.counts)}: {finished} streams, {dict(disturber.moves)}")
        assert finished >= STREAMS
        assert disturber.moves["failovers"] > 0
        assert disturber.moves["given_up"] == 0
        fleet.assert_nothing_left()
    finally:
        fleet.close()
    assert [member.wait() for member in fleet.members] == [0] * len(fleet.members)
    assert [
        child
        for child in psutil.Process().children(recursive=True)
        if any("services.command" in word for word in child.cmdline())
    ] == []
