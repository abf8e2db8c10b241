"""Draining and noticing, with real processes and signals: nothing is cut short, and nothing runs for nobody."""

import asyncio
import contextlib
import random
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from process_fleet import HEARTBEAT_INTERVAL, HEARTBEAT_TIMEOUT, Engine, Frontend, ProcessFleet, wait_until
from streamed_answer import StreamedAnswer, request_bytes, stream

DRAIN_DELAY = 1.0
ENGINE_GRACE = 1.0
# The watch looks twice a heartbeat interval; the rest is for a machine that is busy with other tests.
NOTICED_WITHIN = HEARTBEAT_TIMEOUT + HEARTBEAT_INTERVAL + 0.75


@pytest.fixture(scope="module")
def fleet(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessFleet]:
    fleet = ProcessFleet(
        tmp_path_factory.mktemp("fleet"),
        smollm2,
        num_frontends=2,
        num_engines=2,
        engine={"shutdown_grace": ENGINE_GRACE},
        # Round robin, so that each engine has some of the long requests.
        frontend={"drain_delay": DRAIN_DELAY, "shutdown_grace": 20, "routing": "round_robin"},
    )
    try:
        fleet.start()
        yield fleet
        fleet.assert_nothing_left()
    finally:
        fleet.close()


def body(number: int, max_tokens: int) -> dict[str, Any]:
    return {"prompt": [500 + number, 7, 8], "max_tokens": max_tokens, "seed": number}


async def undisturbed(fleet: ProcessFleet, bodies: list[dict[str, Any]]) -> list[str]:
    answers = await asyncio.gather(*(stream(fleet.frontends[0].port, each) for each in bodies))
    assert all(answer.complete for answer in answers), [answer.describe() for answer in answers]
    return [answer.text for answer in answers]


def check(answers: list[StreamedAnswer], expected: list[str]) -> None:
    for answer, text in zip(answers, expected, strict=True):
        assert answer.complete, answer.describe()
        assert answer.text == text


async def until(condition: Any, what: str, seconds: float = 60.0) -> float:
    return await asyncio.to_thread(wait_until, condition, what, seconds)


def all_running(fleet: ProcessFleet, number: int) -> bool:
    return sum(engine.metric("requests_running") for engine in fleet.engines if engine.is_running) == number


def test_an_engine_that_is_told_to_end_finishes_what_it_can_and_hands_over_the_rest(fleet: ProcessFleet) -> None:
    bodies = [body(number, 20 if number % 2 else 150) for number in range(16)]
    engine = fleet.engines[0]

    async def main() -> None:
        expected = await undisturbed(fleet, bodies)
        handovers, failovers = (fleet.frontend_metric(f"{name}_total") for name in ("handovers", "failovers"))
        answers = [asyncio.create_task(stream(fleet.frontends[n % 2].port, each)) for n, each in enumerate(bodies)]
        await until(lambda: all_running(fleet, len(bodies)), "all run")
        engine.send(signal.SIGTERM)
        # It says GOODBYE: nothing new comes to it, and nobody takes it for lost.
        await until(
            lambda: all(frontend.metric("engines_ready") == 1 for frontend in fleet.frontends), "it is used no more", 2
        )
        began = time.monotonic()
        late = [asyncio.create_task(stream(frontend.port, bodies[1])) for frontend in fleet.frontends]
        assert await asyncio.to_thread(engine.wait) == 0
        assert time.monotonic() - began < ENGINE_GRACE + 2
        check(await asyncio.gather(*answers), expected)
        check(await asyncio.gather(*late), [expected[1]] * 2)
        # The four long ones are left at the end of the grace, and on a slow machine some of the short ones. Each is
        # handed over; none is taken for lost.
        assert fleet.frontend_metric("handovers_total") >= handovers + 4
        assert fleet.frontend_metric("failovers_total") == failovers

    asyncio.run(main())
    engine.start()
    wait_until(lambda: engine.is_up, "the engine is back")
    fleet.wait_connected()


def test_a_frontend_that_is_told_to_end_is_not_ready_at_once_and_finishes_its_streams(fleet: ProcessFleet) -> None:
    bodies = [body(number, 120) for number in range(8)]
    frontend = fleet.frontends[1]

    async def main() -> None:
        expected = await undisturbed(fleet, bodies)
        answers = [asyncio.create_task(stream(frontend.port, each)) for each in bodies]
        await until(lambda: all_running(fleet, len(bodies)), "all run")
        frontend.send(signal.SIGTERM)
        assert await until(lambda: frontend.get("/health/ready")[0] == 503, "it is not ready", 1) < DRAIN_DELAY / 2
        # The load balancer has not noticed yet: what it still sends is answered.
        assert (await stream(frontend.port, body(0, 3))).complete
        assert await asyncio.to_thread(frontend.wait) == 0
        check(await asyncio.gather(*answers), expected)

    asyncio.run(main())
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", frontend.port), timeout=1).close()
    frontend.start()
    wait_until(lambda: frontend.is_up, "the frontend is back")
    fleet.wait_connected()


def test_a_rolling_restart_of_every_process_under_load_fails_no_request(fleet: ProcessFleet) -> None:
    bodies = [body(number, 20 + 5 * number) for number in range(16)]
    rng = random.Random(3)

    async def main() -> None:
        expected = await undisturbed(fleet, bodies)
        over = asyncio.Event()
        listed = set(fleet.frontends)  # those to which a load balancer sends requests
        finished = 0

        async def client(number: int) -> None:
            nonlocal finished
            while not over.is_set():
                answer = await stream(rng.choice(sorted(listed, key=id)).port, bodies[number])
                check([answer], [expected[number]])
                finished += 1

        async def restart_engine(engine: Engine) -> None:
            engine.send(signal.SIGTERM)
            assert await asyncio.to_thread(engine.wait) == 0, engine.log[-3000:]
            engine.start()
            await until(lambda: engine.is_up, "the engine is back")
            await asyncio.to_thread(fleet.wait_connected)

        async def restart_frontend(frontend: Frontend) -> None:
            frontend.send(signal.SIGTERM)
            # A readiness probe finds out and the load balancer is told; connections come until then.
            await until(lambda: not frontend.is_ready, "it is not ready")
            await asyncio.sleep(DRAIN_DELAY / 4)
            listed.discard(frontend)
            assert await asyncio.to_thread(frontend.wait) == 0, frontend.log[-3000:]
            frontend.start()
            await until(lambda: frontend.is_up and frontend.is_ready, "the frontend is back")
            await asyncio.to_thread(fleet.wait_connected)
            listed.add(frontend)

        async with asyncio.TaskGroup() as clients:
            for number in range(len(bodies)):
                clients.create_task(client(number))
            for engine in fleet.engines:
                await restart_engine(engine)
            for frontend in fleet.frontends:
                await restart_frontend(frontend)
            over.set()
        assert finished > len(bodies)

    asyncio.run(main())


@contextlib.contextmanager
def requests_running(fleet: ProcessFleet, frontend: Frontend, number: int) -> Iterator[None]:
    """Long streams through this frontend, whose clients stay."""
    clients: list[socket.socket] = []
    try:
        for each in range(number):
            clients.append(socket.create_connection(("127.0.0.1", frontend.port)))
            content = {"model": "m", "stream": True, **body(each, 2000)}
            clients[-1].sendall(request_bytes("/v1/completions", content))
        wait_until(lambda: all_running(fleet, number), "all run")
        yield
    finally:
        for client in clients:
            client.close()
        wait_until(lambda: all_running(fleet, 0), "the engines stop when the clients leave", 10)


def num_ready(frontend: Frontend, number: int) -> Any:
    return lambda: frontend.metric("engines_ready") == number


def test_a_killed_engine_is_noticed_within_a_second(fleet: ProcessFleet) -> None:
    engine = fleet.engines[1]
    with requests_running(fleet, fleet.frontends[0], 6):
        engine.send(signal.SIGKILL)
        for frontend in fleet.frontends:
            assert wait_until(num_ready(frontend, 1), "it is noticed") < 1.0
        engine.wait()
        wait_until(lambda: fleet.engines[0].metric("requests_running") == 6, "all moved", 5)
    engine.start()
    wait_until(lambda: engine.is_up, "the engine is back")
    fleet.wait_connected()


def test_a_frozen_engine_is_noticed_within_the_heartbeat_timeout(fleet: ProcessFleet) -> None:
    engine = fleet.engines[0]
    with requests_running(fleet, fleet.frontends[0], 6):
        engine.send(signal.SIGSTOP)
        for frontend in fleet.frontends:
            assert wait_until(num_ready(frontend, 1), "it is noticed") < NOTICED_WITHIN
        wait_until(lambda: fleet.engines[1].metric("requests_running") == 6, "all moved", 5)
        engine.send(signal.SIGCONT)
        fleet.wait_connected()
        wait_until(lambda: not any(engine.left_over.values()), "what it had is ended there", 5)


def test_a_cut_network_is_noticed_within_the_heartbeat_timeout_by_both_sides(fleet: ProcessFleet) -> None:
    engine, frontend, link = fleet.engines[0], fleet.frontends[0], fleet.links[0][0]
    with requests_running(fleet, frontend, 6):
        link.swallow()
        assert wait_until(num_ready(frontend, 1), "the frontend notices") < NOTICED_WITHIN
        assert wait_until(lambda: engine.metric("frontends") == 1, "the engine notices") < NOTICED_WITHIN
        wait_until(lambda: not any(engine.left_over.values()), "the engine frees what was the frontend's", 2)
        wait_until(lambda: fleet.engines[1].metric("requests_running") == 6, "all moved", 5)
        link.heal()
        fleet.wait_connected()


def test_a_frontend_that_vanishes_leaves_no_work_and_no_block(fleet: ProcessFleet) -> None:
    frontend = fleet.frontends[1]
    with requests_running(fleet, frontend, 10):
        # As when its node fails: no FIN, no RST.
        for link in fleet.links[1]:
            link.swallow()
        frontend.kill()
        for engine in fleet.engines:
            wait_until(lambda engine=engine: not any(engine.left_over.values()), "its blocks are free", NOTICED_WITHIN)
            assert engine.metric("frontends") == 1
    for link in fleet.links[1]:
        link.heal()
    frontend.start()
    wait_until(lambda: frontend.is_up, "the frontend is back")
    fleet.wait_connected()
