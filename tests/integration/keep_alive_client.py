"""An HTTP client of a few lines that sends any bytes whatever, one request after another on each of its connections."""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

JSON = (("Content-Type", "application/json"),)
_LONGEST_WAIT = 30.0  # seconds for one answer


@dataclass(frozen=True, slots=True)
class RawRequest:
    """A POST; `headers` are beside Host and Content-Length."""

    path: str
    body: bytes
    headers: tuple[tuple[str, str], ...] = JSON


@dataclass(frozen=True, slots=True)
class RawAnswer:
    status: int
    body: bytes


async def send_all(port: int, requests: Iterable[RawRequest], connections: int) -> list[tuple[RawRequest, RawAnswer]]:
    """Each request and its answer, in the order of the answers. Raises TimeoutError where one does not come."""
    waiting = iter(requests)
    answered: list[tuple[RawRequest, RawAnswer]] = []

    async def worker() -> None:
        streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        for request in waiting:
            async with asyncio.timeout(_LONGEST_WAIT):
                if streams is None:
                    streams = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
                answer, stays_open = await _exchange(*streams, request)
            answered.append((request, answer))
            if not stays_open:
                streams[1].close()
                streams = None
        if streams is not None:
            streams[1].close()

    async with asyncio.TaskGroup() as workers:
        for _ in range(connections):
            workers.create_task(worker())
    return answered


async def _exchange(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: RawRequest
) -> tuple[RawAnswer, bool]:
    head = [f"POST {request.path} HTTP/1.1", "Host: test", f"Content-Length: {len(request.body)}"]
    head += [f"{name}: {value}" for name, value in request.headers]
    writer.write("\r\n".join(head).encode() + b"\r\n\r\n" + request.body)
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines[1:] if line)
    if headers.get("transfer-encoding") == "chunked":
        body = b""
        while size := int(await reader.readline(), 16):
            body += (await reader.readexactly(size + 2))[:-2]
        await reader.readexactly(2)
    else:
        body = await reader.readexactly(int(headers["content-length"]))
    return RawAnswer(int(lines[0].split(" ")[1]), body), headers.get("connection") != "close"
