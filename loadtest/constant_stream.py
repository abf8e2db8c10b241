"""The ceiling of a Python server: the same chunk again and again, and nothing else done. For bench_stream_cost.

`uvicorn loadtest.constant_stream:plain` sends it straight to ASGI, `:fastapi` through FastAPI's StreamingResponse;
TANDEM_BENCH_PAUSE is the time between two chunks, in seconds.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

NUM_CHUNKS = 256
PAUSE = float(os.environ.get("TANDEM_BENCH_PAUSE", "0"))
CHUNK = (
    b'data: {"id":"chatcmpl-00000000000000000000000000000000","object":"chat.completion.chunk","created":1700000000,'
    b'"model":"m","choices":[{"index":0,"delta":{"content":" token"},"logprobs":null,"finish_reason":null}]}\n\n'
)

fastapi = FastAPI()


@fastapi.post("/v1/chat/completions")
async def answer(request: Request) -> StreamingResponse:
    await request.body()

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(NUM_CHUNKS):
            yield CHUNK
            await asyncio.sleep(PAUSE)

    return StreamingResponse(chunks(), media_type="text/event-stream")


async def plain(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """A whole ASGI application. uvicorn must be told that there is no lifespan."""
    while (await receive()).get("more_body"):
        pass
    headers = [(b"content-type", b"text/event-stream")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for _ in range(NUM_CHUNKS):
        await send({"type": "http.response.body", "body": CHUNK, "more_body": True})
        await asyncio.sleep(PAUSE)
    await send({"type": "http.response.body", "body": b"", "more_body": False})
