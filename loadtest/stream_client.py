"""A streaming client for benchmarks that costs little itself: one connection a request, bytes, no JSON in the loop.

A client that parsed every chunk would take from the server, on the same cores, what it is there to measure.
"""

import asyncio
import itertools
import json
import time
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class StreamTiming:
    """One streamed answer. Times are in seconds; `chunk_gaps` are those between chunks that carry text."""

    seconds: float
    first_token: float
    chunk_gaps: list[float]
    completion_tokens: int
    prompt_tokens: int


class RequestFailed(RuntimeError):
    """The server answered with an error, or its stream broke off."""


async def timed_completion(host: str, port: int, body: dict[str, Any]) -> StreamTiming:
    """POST `body`, streamed and with usage, to /v1/completions. Raises RequestFailed."""
    content = json.dumps(body | {"stream": True, "stream_options": {"include_usage": True}}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    ).encode()
    reader, writer = await asyncio.open_connection(host, port, limit=4 * 1024 * 1024)
    try:
        started = time.perf_counter()
        writer.write(head + content)
        status = await reader.readline()
        if status.split(b" ")[1:2] != [b"200"]:
            raise RequestFailed((status + await reader.read(4096)).decode(errors="replace"))
        arrivals: list[float] = []
        previous = last = b""
        while line := await reader.readline():
            if line.startswith(b"data: "):
                arrivals.append(time.perf_counter())
                previous, last = last, line
    finally:
        writer.close()
    if last.strip() != b"data: [DONE]":
        raise RequestFailed(f"the stream broke off after {last[:500]!r}")
    usage = json.loads(previous.removeprefix(b"data: ")).get("usage")
    if not usage:
        raise RequestFailed(f"no usage before [DONE], but {previous[:500]!r}")
    texts = arrivals[:-2]  # without the usage and [DONE]
    return StreamTiming(
        seconds=arrivals[-1] - started,
        first_token=texts[0] - started,
        chunk_gaps=[after - before for before, after in itertools.pairwise(texts)],
        completion_tokens=usage["completion_tokens"],
        prompt_tokens=usage["prompt_tokens"],
    )


async def run_closed_loop(host: str, port: int, bodies: list[dict[str, Any]], concurrency: int) -> list[StreamTiming]:
    """All of `bodies`, `concurrency` of them at any time. Raises RequestFailed where one of them failed."""
    waiting = iter(bodies)
    timings: list[StreamTiming] = []

    async def worker() -> None:
        for body in waiting:
            timings.append(await timed_completion(host, port, body))

    async with asyncio.TaskGroup() as workers:
        for _ in range(concurrency):
            workers.create_task(worker())
    return timings
