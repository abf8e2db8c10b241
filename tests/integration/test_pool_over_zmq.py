"""The pool against real engine processes (without a model) on real sockets: killed, frozen, restarted, cut off."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop

from services.frontend.engines import EnginePool, in_process_engine
from services.frontend.engines.connection_state import ConnectionState
from services.frontend.generation import Generation, GenerationError
from services.frontend.settings import EnginePoolSettings, FrontendSettings
from shared.protocol import RequestOutput
from shared.sampling_params import SamplingParams
from tests.free_port import free_port

ROOT = Path(__file__).parents[2]
STEP_SECONDS = 0.01
HEARTBEAT_TIMEOUT = 0.8
VOCAB_SIZE = 5000  # router_engine's


def undisturbed_run(prompt: list[int], max_tokens: int) -> list[int]:
    return in_process_engine.undisturbed_run(prompt, max_tokens, VOCAB_SIZE)


class EngineProcess:
    def __init__(self, port: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("router_engine.py")), str(port), str(STEP_SECONDS)],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())
        self.address = f"127.0.0.1:{self.port}"

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def start_engine() -> Iterator[Callable[..., EngineProcess]]:
    engines: list[EngineProcess] = []

    def start(port: int | None = None) -> EngineProcess:
        engines.append(EngineProcess(port or free_port()))
        return engines[-1]

    yield start
    for engine in engines:
        engine.end()


class Stream:
    """A sink that can be waited for."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.error: GenerationError | None = None
        self.over = asyncio.Event()

    def accept(self, output: RequestOutput) -> bool:
        self.token_ids += output.token_ids
        if output.finish_reason is not None:
            self.over.set()
        return self.over.is_set()

    def fail(self, error: GenerationError) -> None:
        self.error = error
        self.over.set()


def long_prompts(count: int, max_tokens: int) -> list[list[int]]:
    """Prompts whose runs meet no eos before max_tokens."""
    prompts = ([seed] for seed in range(1, 100_000))
    long = (prompt for prompt in prompts if len(undisturbed_run(prompt, max_tokens)) == max_tokens)
    return [next(long) for _ in range(count)]


@contextlib.asynccontextmanager
async def pool_of(*addresses: str, **settings: Any) -> AsyncIterator[EnginePool]:
    times = {"heartbeat_interval": 0.1, "heartbeat_timeout": HEARTBEAT_TIMEOUT, "routing": "round_robin"}
    frontend = FrontendSettings(**{**times, **settings})
    pool = EnginePool("model", frontend, EnginePoolSettings(engine_addresses=list(addresses)), lambda welcome: None)
    await pool.start()
    try:
        yield pool
    finally:
        await pool.stop()


async def until(condition: Callable[[], bool], seconds: float = 10.0) -> float:
    """Wait for the condition; how long that took."""
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < seconds, "the condition did not come true"
        await asyncio.sleep(0.002)
    return time.monotonic() - begin


def in_state(pool: EnginePool, address: str, state: ConnectionState) -> Callable[[], bool]:
    return lambda: address in pool.connections and pool.connections[address].state is state


def submit(pool: EnginePool, prompts: list[list[int]], max_tokens: int) -> list[Stream]:
    streams = []
    for prompt in prompts:
        streams.append(Stream())
        pool.submit(Generation("model", prompt, SamplingParams(max_tokens=max_tokens), streams[-1]))
    return streams


async def assert_undisturbed(streams: list[Stream], prompts: list[list[int]], max_tokens: int) -> None:
    for stream, prompt in zip(streams, prompts, strict=True):
        await asyncio.wait_for(stream.over.wait(), 20)
        assert stream.error is None
        assert stream.token_ids == undisturbed_run(prompt, max_tokens)


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Callable[[], Coroutine[Any, Any, None]]], None]:
    def run_on_loop(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
        factory = uvloop.new_event_loop if request.param == "uvloop" else asyncio.new_event_loop
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(main())

    return run_on_loop


Run = Callable[[Callable[[], Coroutine[Any, Any, None]]], None]
Start = Callable[..., EngineProcess]


def test_streams_outlive_a_killed_engine_which_is_noticed_within_a_second(run: Run, start_engine: Start) -> None:
    first, second = start_engine(), start_engine()
    prompts = long_prompts(20, 60)

    async def main() -> None:
        # Heartbeats far too slow to notice: the socket itself must.
        async with pool_of(first.address, second.address, heartbeat_interval=20, heartbeat_timeout=60) as pool:
            await until(lambda: len(pool._dispatcher.engines) == 2)
            streams = submit(pool, prompts, 60)
            await until(lambda: all(len(stream.token_ids) > 5 for stream in streams))
            first.signal(signal.SIGKILL)
            noticed = await until(in_state(pool, first.address, ConnectionState.CONNECTING))
            assert noticed < 1.0
            await assert_undisturbed(streams, prompts, 60)
            assert pool.num_requests == 0
            assert pool.counts.failovers == 10

    run(main)


def test_streams_outlive_a_frozen_engine_which_is_back_once_it_thaws(run: Run, start_engine: Start) -> None:
    first, second = start_engine(), start_engine()
    prompts = long_prompts(10, 150)

    async def main() -> None:
        async with pool_of(first.address, second.address) as pool:
            await until(lambda: len(pool._dispatcher.engines) == 2)
            streams = submit(pool, prompts, 150)
            await until(lambda: all(len(stream.token_ids) > 5 for stream in streams))
            first.signal(signal.SIGSTOP)
            noticed = await until(in_state(pool, first.address, ConnectionState.CONNECTING))
            assert noticed < 2 * HEARTBEAT_TIMEOUT
            first.signal(signal.SIGCONT)
            await until(in_state(pool, first.address, ConnectionState.READY))
            await assert_undisturbed(streams, prompts, 150)
            # What the frozen one had was ended there: it is idle, and serves.
            await assert_undisturbed(submit(pool, prompts[:4], 20), prompts[:4], 20)
            await until(lambda: pool.connections[first.address].load.reported.running_requests == 0)

    run(main)


def test_an_engine_that_restarts_is_used_again_and_a_lone_stream_waits_for_it(run: Run, start_engine: Start) -> None:
    engine = start_engine()
    prompts = long_prompts(3, 50)

    async def main() -> None:
        async with pool_of(engine.address) as pool:
            await until(lambda: pool.ready)
            streams = submit(pool, prompts, 50)
            await until(lambda: all(len(stream.token_ids) > 5 for stream in streams))
            engine.end()
            await until(lambda: not pool.ready)
            with pytest.raises(GenerationError, match="no engine"):
                submit(pool, prompts, 50)
            await asyncio.to_thread(start_engine, engine.port)
            # The longest pause between two attempts to connect is a second.
            await until(lambda: pool.ready, seconds=3)
            await assert_undisturbed(streams, prompts, 50)

    run(main)


def test_an_engine_that_starts_after_the_frontend_is_found(run: Run, start_engine: Start) -> None:
    port = free_port()

    async def main() -> None:
        async with pool_of(f"127.0.0.1:{port}", "127.0.0.1:1") as pool:
            assert not pool.ready
            await asyncio.to_thread(start_engine, port)
            await until(lambda: pool.ready, seconds=3)
            prompts = long_prompts(4, 10)
            await assert_undisturbed(submit(pool, prompts, 10), prompts, 10)

    run(main)


def test_aborts_reach_the_engine(run: Run, start_engine: Start) -> None:
    engine = start_engine()

    async def main() -> None:
        async with pool_of(engine.address) as pool:
            await until(lambda: pool.ready)
            load = pool.connections[engine.address].load
            generations = [
                Generation("model", prompt, SamplingParams(max_tokens=2000), Stream())
                for prompt in long_prompts(20, 300)
            ]
            for generation in generations:
                pool.submit(generation)
            await until(lambda: load.reported.running_requests == 20)
            for generation in generations:
                pool.abort(generation.request_id)
            await until(lambda: load.reported.running_requests == 0)

    run(main)


def test_a_pool_that_stops_leaves_nothing_running(run: Run, start_engine: Start) -> None:
    engine = start_engine()

    async def main() -> None:
        prompts = long_prompts(5, 300)
        async with pool_of(engine.address) as pool:
            await until(lambda: pool.ready)
            streams = submit(pool, prompts, 2000)
            await until(lambda: all(stream.token_ids for stream in streams))
        assert all(stream.error is not None and stream.error.status == 503 for stream in streams)
        # A second frontend sees an engine without work.
        async with pool_of(engine.address) as pool:
            await until(lambda: pool.ready)
            await until(lambda: pool.connections[engine.address].load.reported.running_requests == 0)

    run(main)


def test_bytes_from_something_that_is_no_engine_disturb_nobody(run: Run, start_engine: Start) -> None:
    engine = start_engine()
    prompts = long_prompts(4, 20)

    async def main() -> None:
        async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(200))
            with contextlib.suppress(ConnectionError):
                await reader.read()
            writer.close()

        server = await asyncio.start_server(babble, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with pool_of(engine.address, f"127.0.0.1:{port}") as pool:
            await until(lambda: pool.ready)
            await assert_undisturbed(submit(pool, prompts, 20), prompts, 20)
            assert not in_state(pool, f"127.0.0.1:{port}", ConnectionState.READY)()
        server.close()

    run(main)


def test_an_engine_with_a_full_queue_gets_nothing_new_until_it_reads_and_then_every_abort(
    run: Run, start_engine: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.frontend.engines.zmq_link.SEND_QUEUE_MESSAGES", 10)
    engine = start_engine()

    async def main() -> None:
        async with pool_of(engine.address, heartbeat_timeout=30) as pool:
            await until(lambda: pool.ready)
            engine.signal(signal.SIGSTOP)
            # More than the kernel's buffers and ZMQ's queue hold.
            sent: list[Generation] = []
            refusal: GenerationError | None = None
            while refusal is None and len(sent) < 4000:
                sent.append(Generation("model", list(range(1, 20_001)), SamplingParams(max_tokens=999), Stream()))
                try:
                    pool.submit(sent[-1])
                except GenerationError as error:
                    refusal = error
                await asyncio.sleep(0)
            assert refusal is not None
            assert refusal.status == 503
            assert not pool.ready
            for generation in sent:
                pool.abort(generation.request_id)
            engine.signal(signal.SIGCONT)
            await until(lambda: pool.ready)
            # A request behind the aborts: its end shows that they were taken.
            prompts = long_prompts(3, 5)
            await assert_undisturbed(submit(pool, prompts, 5), prompts, 5)
            await until(lambda: pool.connections[engine.address].load.reported.running_requests == 0)

    run(main)
