"""Over real sockets: clients that leave, clients that read slowly, and the openai client."""

import asyncio
import json
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from echo_app import EchoPool, LiveServer, parse_events

from services.frontend.settings import FrontendSettings


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it never came to be"
        time.sleep(0.002)


def post(server: LiveServer, path: str, body: dict) -> socket.socket:
    """Send a request on a connection of its own."""
    data = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=20)
    head = f"POST {path} HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


def answers(server: LiveServer) -> None:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none") as client:
        assert [model.id for model in client.models.list()] == ["echo", "echo/alias"]


CHAT = {"messages": [{"role": "user", "content": "hello"}]}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("queued", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_leaves(live: LiveServer, pool: EchoPool, stream, queued, n):
    """Every child is aborted at once: streamed or not, running or still waiting for its first token."""
    pool.hold_after = 0 if queued else 2
    connection = post(live, "/v1/chat/completions", {**CHAT, "stream": stream, "n": n})
    until(lambda: len(pool.running) == n and sum(pool.delivered.values()) == (0 if queued else 2 * n))
    connection.close()
    until(lambda: not pool.running)
    assert sorted(pool.aborted) == sorted(generation.request_id for generation in pool.submitted)
    pool.hold_after = None
    answers(live)


def test_a_client_that_leaves_before_it_has_sent_all(live: LiveServer, pool: EchoPool):
    connection = socket.create_connection(("127.0.0.1", live.port))
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\n")
    connection.sendall(b'Content-Length: 100\r\n\r\n{"prompt": ')
    connection.close()
    answers(live)
    assert not pool.submitted


def test_a_client_that_reads_slowly_loses_nothing(live: LiveServer, pool: EchoPool):
    """While it does not read, its tokens are merged: fewer, larger chunks, and every character."""
    pool.limits.max_model_len = 10**6  # type: ignore[union-attr]
    pool.reply = "".join(chr(97 + number % 26) for number in range(40_000))
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", live.port))
    connection.settimeout(20)
    body = json.dumps({**CHAT, "stream": True}).encode()
    connection.sendall(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: t\r\nConnection: close\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n" % len(body) + body
    )
    until(lambda: bool(pool.submitted) and not pool.running)
    data = b""
    while piece := connection.recv(1 << 16):
        data += piece
    connection.close()
    stream = parse_events(unchunk(data))
    contents = [choice["delta"].get("content", "") for event in stream for choice in event["choices"]]
    assert "".join(contents) == pool.reply
    assert len(contents) < 20_000
    assert max(map(len, contents)) > 1000


def unchunk(response: bytes) -> str:
    _, _, rest = response.partition(b"\r\n\r\n")
    body = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        body += rest[: int(size, 16)]
        rest = rest[int(size, 16) + 2 :]
    return body.decode()


def test_the_openai_client(live: LiveServer):
    with openai.OpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(
            model="echo",
            messages=[{"role": "user", "content": "héllo"}],
            temperature=0.5,
            top_p=0.9,
            seed=1,
            n=2,
            stop=["zzz"],
            logprobs=True,
            top_logprobs=2,
            max_completion_tokens=100,
            extra_body={"top_k": 5},
        )
        assert [choice.message.content for choice in answer.choices] == ["user:héllo|assistant:"] * 2
        assert answer.usage is not None
        assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
        assert answer.choices[0].logprobs is not None
        stream = client.chat.completions.create(
            model="echo",
            messages=[{"role": "user", "content": "héllo"}],
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "user:héllo|assistant:"
        assert chunks[-1].usage is not None
        completion = client.completions.create(model="echo", prompt=["ab", "cd"], echo=True, logprobs=1)
        assert [choice.text for choice in completion.choices] == ["abab", "cdcd"]
        assert client.models.retrieve("echo/alias").id == "echo/alias"


def test_the_openai_clients_errors(live: LiveServer, pool: EchoPool):
    with openai.OpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0) as client:
        ask = client.chat.completions.create
        messages = [{"role": "user", "content": "hi"}]
        with pytest.raises(openai.NotFoundError) as missing:
            ask(model="nope", messages=messages)  # type: ignore[arg-type]
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as bad:
            ask(model="echo", messages=messages, top_p=0)  # type: ignore[arg-type]
        assert bad.value.param == "top_p"
        pool.fail_after = 4
        with pytest.raises(openai.APIError, match="the engine died"):
            for _ in ask(model="echo", messages=messages, stream=True):  # type: ignore[arg-type]
                pass


def test_many_openai_clients_at_once(live: LiveServer):
    async def one(client: openai.AsyncOpenAI, number: int) -> str:
        content = f"number {number} 👩‍👧"
        messages = [{"role": "user", "content": content}]
        stream = await client.chat.completions.create(model="echo", messages=messages, stream=True)  # type: ignore[arg-type]
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert text == f"user:{content}|assistant:"
        return text

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=live.url + "/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(one(client, number) for number in range(32)))

    assert len(set(asyncio.run(all_of_them()))) == 32


def test_malformed_bodies_do_not_disturb_others(live: LiveServer):
    with ThreadPoolExecutor(4) as threads:
        bad = [threads.submit(_answer_to, live, body) for body in (b"{", b"\xff", b"[" * 9999, b'{"messages": 5}') * 5]
        answers(live)
        assert {job.result() for job in bad} == {b"HTTP/1.1 400"}


def _answer_to(server: LiveServer, body: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n" % len(body) + body
        )
        return connection.recv(1 << 16)[:12]


@pytest.fixture
def settings() -> FrontendSettings:
    return FrontendSettings(model="echo", stream_keep_alive=0.02)


@pytest.mark.parametrize("silent_after", [0, 3])
@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_a_silent_stream_is_kept_alive(live: LiveServer, pool: EchoPool, silent_after: int, path: str):
    """Queued, or between two tokens: proxies hear a comment, and clients none of it."""
    pool.hold_after = silent_after
    body = {**CHAT, "stream": True} if "chat" in path else {"prompt": "hello", "stream": True}
    connection = post(live, f"/v1/{path}", body)
    received = b""
    while received.count(b": waiting\n\n") < 3:
        received += connection.recv(65536)
    assert received.startswith(b"HTTP/1.1 200 ")
    pool.hold_after = None
    while b"data: [DONE]\n\n" not in received:
        received += connection.recv(65536)
    connection.close()
    text = unchunk(received)
    assert text.count(": waiting\n\n") >= 3
    chunks = parse_events(text.replace(": waiting\n\n", ""))
    texts = [
        choice.get("text") or choice.get("delta", {}).get("content") or "" for c in chunks for choice in c["choices"]
    ]
    assert "".join(texts) == ("user:hello|assistant:" if "chat" in path else "hello")


def test_the_openai_client_passes_over_what_keeps_a_stream_alive(live: LiveServer, pool: EchoPool):
    pool.hold_after = 2
    with openai.OpenAI(base_url=live.url + "/v1", api_key="none") as client:
        stream = client.completions.create(model="echo", prompt="hello", stream=True)
        time.sleep(0.1)
        pool.hold_after = None
        assert "".join(chunk.choices[0].text for chunk in stream) == "hello"


def test_a_refusal_after_the_wait_is_a_chunk_and_the_stream_ends(live: LiveServer, pool: EchoPool):
    pool.hold_after = 0
    connection = post(live, "/v1/completions", {"prompt": "hello", "stream": True})
    received = b""
    while b": waiting" not in received:
        received += connection.recv(65536)
    pool.fail_after = 0
    pool.hold_after = None
    while b"data: [DONE]\n\n" not in received:
        received += connection.recv(65536)
    connection.close()
    *_, error = parse_events(unchunk(received).replace(": waiting\n\n", ""))
    assert error["error"]["message"] == "the engine died"


def test_a_client_that_leaves_a_silent_stream(live: LiveServer, pool: EchoPool):
    pool.hold_after = 0
    connection = post(live, "/v1/completions", {"prompt": "hello", "stream": True})
    while b": waiting" not in connection.recv(65536):
        pass
    connection.close()
    until(lambda: not pool.running)
