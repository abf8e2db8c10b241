"""Requests leave no objects that refer to each other: only the garbage collector would find them, and it looks at all
objects rarely, since every stream waits meanwhile."""

import asyncio
import gc
import json
from typing import Any

import pytest
from echo_app import EchoPool, LiveServer
from fastapi import FastAPI
from starlette.types import Message, Scope
from test_live_streams import post, until
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

REQUESTS = 50
CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}


async def ask(app: FastAPI, path: str, content: bytes) -> int:
    """The answer's status."""
    arrives: asyncio.Queue[Message] = asyncio.Queue()
    arrives.put_nowait({"type": "http.request", "body": content, "more_body": False})
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "scheme": "http",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
    }
    await app(scope, arrives.get, send)
    return sent[0]["status"]


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/chat/completions", CHAT | {"stream": True}, 200),
        ("/v1/chat/completions", CHAT, 200),
        ("/v1/chat/completions", CHAT | {"n": 3, "stream": True, "logprobs": True}, 200),
        ("/v1/completions", {"prompt": "hello", "stream": True}, 200),
        ("/v1/chat/completions", CHAT | {"temperature": -1}, 400),
        ("/v1/chat/completions", CHAT | {"model": "another"}, 404),
    ],
)
def test_requests_leave_no_cycles(app: FastAPI, path: str, body: dict[str, Any], status: int) -> None:
    content = json.dumps(body).encode()

    async def main() -> int:
        for _ in range(3):
            assert await ask(app, path, content) == status
        gc.collect()
        gc.disable()
        try:
            for _ in range(REQUESTS):
                await ask(app, path, content)
            await asyncio.sleep(0)
            return gc.collect()
        finally:
            gc.enable()

    assert asyncio.run(main()) < REQUESTS


def requests_in_memory() -> int:
    return sum(type(each) is RequestResponseCycle for each in gc.get_objects())


@pytest.mark.parametrize(
    ("path", "body", "leaves"),
    [
        ("/v1/chat/completions", CHAT, False),
        ("/v1/chat/completions", CHAT | {"stream": True}, False),
        ("/v1/chat/completions", CHAT | {"stream": True}, True),
        # Its body is never read, and would stay too.
        ("/nowhere", {"prompt": "x" * 60_000}, False),
    ],
    ids=["whole", "stream", "left", "unread"],
)
def test_a_servers_requests_leave_with_their_connections(
    live: LiveServer, pool: EchoPool, path: str, body: dict[str, Any], leaves: bool
) -> None:
    gc.collect()
    before = requests_in_memory()
    gc.disable()
    try:
        for _ in range(10):
            pool.hold_after = 1 if leaves else None
            connection = post(live, path, body)
            assert connection.recv(65536).startswith(b"HTTP/1.1 ")
            connection.close()
            until(lambda: not pool.running)
        until(lambda: requests_in_memory() <= before)
    finally:
        gc.enable()
