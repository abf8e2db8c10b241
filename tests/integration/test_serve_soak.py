"""A soak of real processes: after 2,000 requests that end in every way, nothing of them is left on either side."""

import asyncio
import contextlib
import random
import re
import time
from pathlib import Path

import httpx

from loadtest.server_process import ServerProcess
from tests.start_server import StartServer

REQUESTS = 2000
CONCURRENCY = 48
MODEL = "SmolLM2-135M-Instruct"


def metric(url: str, name: str) -> float:
    """The sum of a metric over its labels."""
    text = httpx.get(f"{url}/metrics", timeout=10).text
    values = re.findall(rf"^{name}(?:\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE)
    assert values, f"{url}/metrics has no {name}:\n{text}"
    return sum(float(value) for value in values)


async def one_request(client: httpx.AsyncClient, rng: random.Random) -> str:
    """Ask once, and end it in one of the ways in which clients end requests."""
    max_tokens = rng.choice([1, 2, rng.randint(1, 30), rng.randint(1, 150)])
    body = {
        "model": MODEL,
        "prompt": [rng.randrange(100, 40_000) for _ in range(rng.choice([1, rng.randint(1, 40), rng.randint(1, 300)]))],
        "max_tokens": max_tokens,
        "n": rng.choice([1, 1, 1, 3]),
        "ignore_eos": rng.random() < 0.5,
        "stream": rng.random() < 0.6,
        "seed": rng.randrange(2**31),
    }
    way = rng.choice(["finish", "finish", "leave at once", "leave later"])
    if way == "finish" and not body["stream"]:
        response = await client.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        assert len(response.json()["choices"]) == body["n"]
        return way
    if not body["stream"]:
        # A client that gives up: its connection closes while the request is queued or runs.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(rng.uniform(0.0, 0.05)):
                await client.post("/v1/completions", json=body)
        return way
    async with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        chunks_to_read = {"finish": 10**9, "leave at once": 0}.get(way, rng.randint(1, 10))
        last = ""
        async for line in response.aiter_lines():
            if line:
                last = line
                chunks_to_read -= 1
            if chunks_to_read <= 0:
                break
        assert way != "finish" or last == "data: [DONE]"
    return way


async def soak(server: ServerProcess) -> dict[str, int]:
    rng = random.Random(1)
    waiting = iter(range(REQUESTS))
    ways: dict[str, int] = {}

    async def worker(client: httpx.AsyncClient) -> None:
        for _ in waiting:
            way = await one_request(client, rng)
            ways[way] = ways.get(way, 0) + 1

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=CONCURRENCY)
    client = httpx.AsyncClient(base_url=server.url, timeout=60, limits=limits)
    async with client, asyncio.TaskGroup() as workers:
        for _ in range(CONCURRENCY):
            workers.create_task(worker(client))
    return ways


def test_after_2000_requests_every_block_is_free(smollm2: Path, start_server: StartServer) -> None:
    # Few blocks and a small budget: chunked prefill and preemption happen all the time.
    server = start_server(
        *("--executor", "simulated", "--simulated-step-ms", "1", "--log-level", "warning"),
        *("--num-kv-blocks", "48", "--max-num-seqs", "24", "--max-num-batched-tokens", "256"),
        *("--max-model-len", "512"),
    )
    ways = asyncio.run(soak(server))
    assert sum(ways.values()) == REQUESTS

    engine = f"http://127.0.0.1:{server.engines[0]['probe_port']}"
    assert metric(engine, "tandem_engine_generated_tokens_total") > REQUESTS
    assert metric(engine, "tandem_engine_preemptions_total") > 0
    deadline = time.monotonic() + 20
    while True:
        left = {
            "requests running": metric(engine, "tandem_engine_requests_running"),
            "requests waiting": metric(engine, "tandem_engine_requests_waiting"),
            "blocks in use": metric(engine, "tandem_engine_kv_blocks") - metric(engine, "tandem_engine_kv_blocks_free"),
            # The scrape is a request itself, where the frontend counts it.
            "frontend requests": max(0.0, metric(server.url, "tandem_frontend_requests_in_flight") - 1),
            "frontend streams": metric(server.url, "tandem_frontend_streams_in_flight"),
        }
        if not any(left.values()):
            break
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.1)
    assert "Traceback" not in server.log
