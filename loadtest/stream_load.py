"""Runs stream_load.c, which is compiled at its first use: the client of the frontend's benchmarks."""

import json
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest.compiled import compiled

_SOURCE = Path(__file__).with_name("stream_load.c")


@dataclass(slots=True)
class StreamLoad:
    """What the clients saw. Milliseconds; a figure that was not measured is negative. Ages are those of tokens as they
    arrive at the clients' sockets; waits, how long what has arrived is not read yet: where they are long, the client is
    the bottleneck. A stream's tokens are those of the measured time, where there were words to tell them by."""

    seconds: float
    answers: int
    failed: int
    chunks: int
    tokens: int
    reads: int
    bytes: int
    cpu_seconds: float
    first_median_ms: float
    first_p99_ms: float
    age_median_ms: float
    age_p99_ms: float
    age_most_ms: float
    wait_p99_ms: float
    stream_median_tokens: float
    stream_least_tokens: float


def stream_load() -> Path:
    """The compiled program. Raises NoCompiler."""
    return compiled(_SOURCE, "-O2")


def nicely(niceness: int) -> list[str]:
    """What to put before a command that leaves the cores to others, as if it ran on another machine."""
    return ["nice", "-n", str(niceness)] if niceness else []


def http_request(path: str, body: dict[str, Any]) -> bytes:
    """The whole request for a streamed answer."""
    content = json.dumps(body | {"stream": True}).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    )
    return head.encode() + b"\r\n\r\n" + content


def run_stream_load(
    port: int,
    request: bytes,
    streams: int,
    *,
    answers: int | None = None,
    seconds: float | None = None,
    interval: float = 1e-3,
    words: Sequence[bytes] = (),
    niceness: int = 0,
    at_begin: Callable[[], None] = lambda: None,
    at_end: Callable[[], None] = lambda: None,
) -> StreamLoad:
    """Either `answers` in all, or `seconds` of the steady state, at whose ends the functions are called; then the
    streams begin `interval` seconds after each other.
    `words`: see the C file. `niceness`: see `nicely`. Raises RuntimeError where an answer failed."""
    with tempfile.TemporaryDirectory(prefix="tandem-load-") as folder:
        request_file, words_file = Path(folder) / "request", Path(folder) / "words"
        request_file.write_bytes(request)
        words_file.write_bytes(b"\n".join(words))
        command = [*nicely(niceness), str(stream_load()), "127.0.0.1", str(port), str(request_file), str(streams)]
        command += ["-n", str(answers)] if answers is not None else ["-t", str(seconds), "-i", str(interval)]
        command += ["-w", str(words_file)] if words else []
        if answers is not None:
            at_begin()
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            try:
                result = ""
                for line in process.stdout:
                    if line == "begin\n":
                        at_begin()
                    elif line == "end\n":
                        at_end()
                    else:
                        result = line
                errors = process.stderr.read()
            finally:
                process.kill()
        if answers is not None:
            at_end()
    if process.returncode or not result:
        raise RuntimeError(f"the streams failed: {errors[:1000] or result}")
    return StreamLoad(**json.loads(result))
