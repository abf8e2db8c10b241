"""A streaming client on bare sockets: what an OpenAI client would be told, at a small part of its cost."""

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class StreamedAnswer:
    """One stream's events, as they came. `status` is 0 where the connection broke before an answer."""

    status: int = 0
    events: list[dict[str, Any]] = field(default_factory=list)
    done: bool = False
    raw: bytes = b""

    @property
    def text(self) -> str:
        """The first choice's text, of either route."""
        return "".join(
            choice["text"] if "text" in choice else choice["delta"].get("content") or "" for choice in self.choices()
        )

    @property
    def reasoning(self) -> str:
        return "".join(choice.get("delta", {}).get("reasoning") or "" for choice in self.choices())

    @property
    def token_ids(self) -> list[int]:
        """Where return_token_ids was set."""
        return [token_id for choice in self.choices() for token_id in choice.get("token_ids") or []]

    @property
    def finish_reasons(self) -> list[str]:
        return [choice["finish_reason"] for choice in self.choices() if choice["finish_reason"]]

    @property
    def usage(self) -> dict[str, Any] | None:
        return next((event["usage"] for event in self.events if event.get("usage")), None)

    @property
    def error(self) -> dict[str, Any] | None:
        return next((event["error"] for event in self.events if "error" in event), None)

    @property
    def complete(self) -> bool:
        """It ended as a stream should: one finish reason, no error, [DONE] at the end."""
        return self.status == 200 and self.done and self.error is None and len(self.finish_reasons) == 1

    def choices(self) -> list[dict[str, Any]]:
        return [choice for event in self.events for choice in event.get("choices", ()) if choice["index"] == 0]

    def describe(self) -> str:
        last = self.raw[-1500:] if self.status != 200 else json.dumps(self.events[-3:])
        return f"status {self.status}, {len(self.events)} events, done {self.done}: {last}"


def request_bytes(path: str, body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n"
    return f"{head}Connection: close\r\n\r\n".encode() + content


async def stream(port: int, body: dict[str, Any], path: str = "/v1/completions") -> StreamedAnswer:
    """POST `body` as a stream with usage, and read to the end. Never raises for what the server does."""
    body = {"model": "m", "stream": True, "stream_options": {"include_usage": True}, **body}
    status = 0
    lines: list[bytes] = []
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=16 * 1024 * 1024)
        try:
            writer.write(request_bytes(path, body))
            status_line = await reader.readline()
            status = int(status_line.split()[1]) if status_line else 0
            while line := await reader.readline():
                lines.append(line)
        finally:
            writer.close()
    except OSError as error:
        lines.append(repr(error).encode())
    return parse(status, lines)


def parse(status: int, lines: list[bytes]) -> StreamedAnswer:
    """What follows the status line, as it came: headers, chunk sizes and all."""
    answer = StreamedAnswer(status, raw=b"" if status == 200 else b"".join(lines))
    data = [line[6:-1] for line in lines if line.startswith(b"data: ")]
    answer.done = bool(data) and data[-1] == b"[DONE]"
    answer.events = [json.loads(line) for line in (data[:-1] if answer.done else data)]
    return answer
