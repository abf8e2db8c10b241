"""What `bench_serve` measures in turns: servers of OpenAI's API, and transformers' `generate` as a yardstick."""

import asyncio
import json
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from loadtest.server_process import ROOT
from loadtest.stream_client import StreamTiming, run_closed_loop

OUTPUT_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Round:
    """Output tokens a second over all of it, and each answer's times where it is streamed."""

    tokens_per_second: float
    timings: list[StreamTiming] = field(default_factory=list)


class Contender(Protocol):
    """Idle but in `run`."""

    @property
    def name(self) -> str: ...

    def run(self, texts: list[str], concurrency: int) -> Round:
        """Answer `texts`, OUTPUT_TOKENS each, greedily, `concurrency` at any time."""
        ...


@dataclass(frozen=True, slots=True)
class Server:
    """A running server, by the address that its clients know."""

    name: str
    host: str
    port: int
    model: str

    def run(self, texts: list[str], concurrency: int) -> Round:
        common = {"model": self.model, "max_tokens": OUTPUT_TOKENS, "temperature": 0, "ignore_eos": True}
        bodies = [common | {"prompt": text} for text in texts]

        async def run() -> tuple[float, list[StreamTiming]]:
            loop = asyncio.get_running_loop()
            started = loop.time()
            timings = await run_closed_loop(self.host, self.port, bodies, concurrency)
            return loop.time() - started, timings

        seconds, timings = asyncio.run(run())
        tokens = sum(timing.completion_tokens for timing in timings)
        if tokens != len(texts) * OUTPUT_TOKENS:
            raise RuntimeError(f"{len(texts)} answers of {OUTPUT_TOKENS} tokens were asked for, {tokens} tokens came")
        return Round(tokens / seconds, timings)


def parse_peer(argument: str) -> Server:
    """`NAME=URL` of a server that somebody has started, which names its model itself.

    Raises ValueError, OSError where it does not answer.
    """
    name, _, url = argument.partition("=")
    address = urlsplit(url)
    if not name or address.scheme != "http" or address.hostname is None:
        raise ValueError(f"{argument!r} is no peer: say NAME=http://HOST:PORT")
    with urllib.request.urlopen(f"{url.rstrip('/')}/v1/models", timeout=10) as answer:
        model = json.load(answer)["data"][0]["id"]
    return Server(name, address.hostname, address.port or 80, model)


class TransformersGenerate:
    """transformers in a process of its own; a round is one batch of `concurrency` prompts."""

    name = "transformers"

    def __init__(self, folder: Path, tokenize: Callable[[str], list[int]]) -> None:
        self._tokenize = tokenize
        self._process = subprocess.Popen(
            [sys.executable, "-m", "loadtest.transformers_generate", str(folder)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.threads: int = self._read()["threads"]

    def run(self, texts: list[str], concurrency: int, max_tokens: int = OUTPUT_TOKENS) -> Round:
        prompts = [self._tokenize(text) for text in texts[:concurrency]]
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "max_tokens": max_tokens}) + "\n")
        self._process.stdin.flush()
        return Round(len(prompts) * max_tokens / self._read()["seconds"])

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"transformers' process ended with {self._process.wait()}; its message is above")
        return json.loads(line)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
