"""One streamed chat completion, timed token by token, in locust's terms. Scenarios use it, locust_tokens counts."""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from geventhttpclient.response import HTTPSocketResponse
from locust.contrib.fasthttp import FastHttpUser
from locust.exception import CatchResponseError
from locust.stats import RequestStats

from loadtest.locust_tokens import record_gap, record_stream, record_ttft


@dataclass
class Answer:
    """What came back: text, tokens as the server counts them (chunks where it does not), whether all of it came."""

    text: str
    tokens: int
    complete: bool


def stream_chat(
    user: FastHttpUser, scenario: str, messages: list[dict[str, Any]], hang_up_after: int | None = None
) -> Answer:
    """Ask, read to the end, or hang up after so many chunks; every number goes to locust's statistics.

    A stream that breaks, that carries an error, or that ends without finish reason and `[DONE]` is a failed request.
    """
    options = user.environment.parsed_options
    body: dict[str, Any] = {
        "model": options.model,
        "messages": messages,
        "max_tokens": options.max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if options.ignore_eos:
        body["ignore_eos"] = True
    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    if hang_up_after is not None:
        headers["Connection"] = "close"
    answer = Answer("", 0, False)
    start = time.perf_counter()
    with user.client.post(
        "/v1/chat/completions", json=body, headers=headers, name=scenario, stream=True, catch_response=True
    ) as response:
        try:
            if response.status_code != 200:
                raise CatchResponseError(f"status {response.status_code}: {(response.text or '')[:200]}")
            _read(user.environment.stats, scenario, response.stream, answer, start, hang_up_after)
        except (OSError, ValueError, KeyError, CatchResponseError) as error:
            response.failure(error)
        else:
            response.success()
        finally:
            # The whole stream, where locust has taken the time to the headers.
            response.request_meta["response_time"] = (time.perf_counter() - start) * 1000
            response.request_meta["response_length"] = len(answer.text)
            if hang_up_after is not None and response.status_code:
                response.stream.release()
    return answer


def _read(
    stats: RequestStats,
    scenario: str,
    stream: HTTPSocketResponse,
    answer: Answer,
    start: float,
    hang_up_after: int | None,
) -> None:
    pieces: list[str] = []
    finish_reason = error = None
    first = last = 0.0
    chunks = 0
    for event in _events(stream):
        now = time.perf_counter()
        error = event.get("error") or error
        if event.get("usage"):
            answer.tokens = event["usage"]["completion_tokens"]
        for choice in event.get("choices", []):
            finish_reason = choice.get("finish_reason") or finish_reason
            delta = choice["delta"]
            piece = delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning") or ""
            if not piece:
                continue
            pieces.append(piece)
            chunks += 1
            if chunks == 1:
                first = now
                record_ttft(stats, scenario, (now - start) * 1000)
            else:
                record_gap(stats, scenario, (now - last) * 1000)
            last = now
        if hang_up_after is not None and chunks >= hang_up_after:
            answer.text, answer.tokens = "".join(pieces), chunks
            record_stream(stats, scenario, chunks, last - first)
            return
    if error is not None:
        raise CatchResponseError(f"error in the stream: {json.dumps(error)[:200]}")
    if finish_reason is None:
        raise CatchResponseError("the stream ended without a finish reason")
    answer.text = "".join(pieces)
    answer.tokens = answer.tokens or chunks
    answer.complete = True
    record_stream(stats, scenario, answer.tokens, last - first)


def _events(stream: HTTPSocketResponse) -> Iterator[dict[str, Any]]:
    """The stream's events, to the end, so that the connection can be used again."""
    done = False
    while line := bytes(stream.readline(b"\n")):
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            done = True
        else:
            yield json.loads(data)
    if not done:
        raise CatchResponseError("the stream ended without [DONE]")
