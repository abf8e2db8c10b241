"""Clients that read nothing: they take no speed from the others and no memory without end, and lose no character."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from process_fleet import ProcessFleet, wait_until
from streamed_answer import StreamedAnswer, parse, request_bytes, stream

CLIENTS = 200
TOKENS = 150
STEP_MS = 100
# Every chunk names the model: chunks of a kilobyte fill all buffers on the way within a few seconds.
LONG_NAME = "m" * 900
# Of one client: what the kernel and the transport hold unsent, and the rest of its text, generously.
BYTES_PER_SLOW_CLIENT = 512 * 1024


@pytest.fixture(scope="module")
def fleet(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessFleet]:
    fleet = ProcessFleet(
        tmp_path_factory.mktemp("fleet"),
        smollm2,
        num_frontends=1,
        num_engines=1,
        engine={
            "served_model_name": [LONG_NAME],
            "simulated_step_ms": STEP_MS,
            "max_num_seqs": 2 * CLIENTS,
            "num_kv_blocks": 8 * CLIENTS * TOKENS // 16,
        },
        # Many clients on few cores: slowness is no death.
        frontend={"served_model_name": [LONG_NAME], "heartbeat_timeout": 10},
    )
    try:
        fleet.start()
        yield fleet
        fleet.assert_nothing_left()
    finally:
        fleet.close()


def body(number: int) -> dict[str, Any]:
    return {"model": LONG_NAME, "prompt": [600 + number % 10, 5], "max_tokens": TOKENS, "seed": number % 10}


class SlowClient:
    """Asks for a stream, and leaves the answer where it is until it is told to read."""

    def __init__(self, port: int, number: int) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self._socket.connect(("127.0.0.1", port))
        content = {**body(number), "stream": True, "stream_options": {"include_usage": True}}
        self._socket.sendall(request_bytes("/v1/completions", content))

    def read(self) -> StreamedAnswer:
        with self._socket, self._socket.makefile("rb") as file:
            status, *lines = file.readlines()
        return parse(int(status.split()[1]), lines)


class PeakMemory:
    """The highest resident memory of a process while the block runs, looked at four times a second."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self.before = self.peak = self._process.memory_info().rss
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> "PeakMemory":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.25):
            self.peak = max(self.peak, self._process.memory_info().rss)


async def run_streams(port: int) -> tuple[list[StreamedAnswer], float]:
    """CLIENTS streams that are read as they come, and the seconds that they took."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    answers = await asyncio.gather(*(stream(port, body(number)) for number in range(CLIENTS)))
    return answers, loop.time() - began


def test_clients_that_read_nothing_disturb_nobody_and_lose_nothing(fleet: ProcessFleet) -> None:
    frontend, engine = fleet.frontends[0], fleet.engines[0]
    undisturbed, seconds_alone = asyncio.run(run_streams(frontend.port))
    expected = [answer.text for answer in undisturbed[:10]]
    assert all(answer.complete for answer in undisturbed), [answer.describe() for answer in undisturbed]
    assert frontend.process is not None

    with PeakMemory(frontend.process.pid) as memory:
        slow = [SlowClient(frontend.port, number) for number in range(CLIENTS)]
        wait_until(lambda: engine.metric("requests_running") == CLIENTS, "all slow clients' requests run")
        answers, seconds = asyncio.run(run_streams(frontend.port))
        # The engine waits for no client.
        wait_until(lambda: engine.metric("requests_running") == 0, "the slow clients' answers are made", 60)
        assert frontend.metric("streams_in_flight") == CLIENTS
    for number, answer in enumerate(answers):
        assert answer.complete, answer.describe()
        assert answer.text == expected[number % 10]
    ratio = seconds_alone / seconds
    grown = memory.peak - memory.before
    print(
        f"\nthe others' rate beside {CLIENTS} slow clients: {ratio:.2f} of that without; {grown / 2**20:.0f} MiB more"
    )
    assert ratio > 0.8
    assert grown < CLIENTS * BYTES_PER_SLOW_CLIENT

    num_chunks = 0
    for number, client in enumerate(slow):
        answer = client.read()
        assert answer.complete, answer.describe()
        assert answer.text == expected[number % 10]
        assert answer.usage is not None
        assert answer.usage["completion_tokens"] == TOKENS
        num_chunks += len(answer.events)
    # They got fewer and larger chunks: what lay unread was merged.
    assert num_chunks < 0.95 * sum(len(answer.events) for answer in undisturbed)
