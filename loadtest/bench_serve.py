"""The speed of `tandem serve` with SmolLM2 in bf16, beside transformers' `generate` in the same run.

    python -m loadtest.bench_serve [--rounds 3] [--concurrency 1 8 32] [--output loadtest/results/bench_serve.json]

For short and long prompts, 64 tokens out, at each concurrency: output tokens/s, time to first token and
inter-token latency. Server and yardstick take turns, one idle while the other runs, and the medians of several
rounds are shown: on a shared machine, one round says little. No two prompts share a beginning, so that the prefix
cache has nothing to give; decoding is greedy.
"""

import argparse
import asyncio
import json
import math
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from loadtest.server_process import ROOT, ServerProcess, tandem_serve
from loadtest.stream_client import StreamTiming, run_closed_loop
from services.launcher.smollm2 import ensure_smollm2

OUTPUT_TOKENS = 64
PROMPT_TOKENS = {"short": 30, "long": 500}
# Common enough that most are one token.
WORDS = (
    "river",
    "mountain",
    "window",
    "market",
    "garden",
    "letter",
    "silver",
    "morning",
    "planet",
    "engine",
    "bridge",
    "winter",
    "paper",
    "station",
    "island",
    "music",
    "forest",
    "doctor",
    "village",
    "machine",
    "history",
    "kitchen",
    "summer",
    "ocean",
    "valley",
    "picture",
    "journey",
    "captain",
    "library",
    "harvest",
    "number",
    "water",
)


@dataclass(slots=True)
class Cell:
    """One line of the table. Rates in output tokens a second, times in milliseconds, medians over the rounds."""

    prompt: str
    concurrency: int
    tokens_per_second: float
    transformers_tokens_per_second: float
    first_token_median_ms: float
    first_token_p99_ms: float
    inter_token_median_ms: float
    inter_token_p99_ms: float
    rates: list[float]
    transformers_rates: list[float]

    @property
    def ratio(self) -> float:
        return self.tokens_per_second / self.transformers_tokens_per_second


class Prompts:
    """Texts of about a given number of tokens, each different from its first words on."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._random = random.Random(0)
        self._count = 0

    def make(self, tokens: int) -> str:
        self._count += 1
        words = [f"Note {self._random.randrange(10**6)}:"]
        words += self._random.choices(WORDS, k=tokens)
        ids = self._tokenizer(" ".join(words))["input_ids"][:tokens]
        return self._tokenizer.decode(ids)

    def token_ids(self, text: str) -> list[int]:
        return self._tokenizer(text)["input_ids"]


class TransformersGenerate:
    """The yardstick's process; idle (it waits for a line) while the server is measured."""

    def __init__(self, folder: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "loadtest.transformers_generate", str(folder)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.threads: int = self._read()["threads"]

    def tokens_per_second(self, prompts: list[list[int]]) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "max_tokens": OUTPUT_TOKENS}) + "\n")
        self._process.stdin.flush()
        return len(prompts) * OUTPUT_TOKENS / self._read()["seconds"]

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"transformers' process ended with {self._process.wait()}; its message is above")
        return json.loads(line)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="how often each cell is measured (default 3)")
    parser.add_argument("--requests", type=int, default=3, help="requests for each unit of concurrency (default 3)")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompts", nargs="+", choices=list(PROMPT_TOKENS), default=list(PROMPT_TOKENS))
    parser.add_argument("--serve-flags", nargs=argparse.REMAINDER, default=[], help="the rest goes to tandem serve")
    parser.add_argument("--output", type=Path, default=ROOT / "loadtest" / "results" / "bench_serve.json")
    options = parser.parse_args(arguments)

    folder = ensure_smollm2()
    prompts = Prompts(folder)
    print("Starting the server and transformers …", file=sys.stderr, flush=True)
    with (
        tempfile.TemporaryDirectory(prefix="tandem-bench-") as scratch,
        tandem_serve(Path(scratch), "--dtype", "bfloat16", *options.serve_flags) as server,
        closing(TransformersGenerate(folder)) as yardstick,
    ):
        cells = [
            _measure(server, yardstick, prompts, prompt, concurrency, options.rounds, options.requests)
            for prompt in options.prompts
            for concurrency in options.concurrency
        ]
        machine = _machine(yardstick.threads)
    print(table(cells))
    options.output.parent.mkdir(parents=True, exist_ok=True)
    result = {"machine": machine, "rounds": options.rounds, "cells": [asdict(cell) for cell in cells]}
    options.output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(f"\n{json.dumps(machine)}\nAll numbers: {options.output}", flush=True)
    return 0


def _measure(
    server: ServerProcess,
    yardstick: TransformersGenerate,
    prompts: Prompts,
    prompt: str,
    concurrency: int,
    rounds: int,
    requests: int,
) -> Cell:
    length = PROMPT_TOKENS[prompt]
    _serve(server, [prompts.make(length) for _ in range(concurrency)], concurrency)  # warm up
    yardstick.tokens_per_second([prompts.token_ids(prompts.make(length)) for _ in range(concurrency)])
    rates, yardstick_rates, timings = [], [], []
    for number in range(rounds):
        print(f"{prompt} prompts, concurrency {concurrency}, round {number + 1} …", file=sys.stderr, flush=True)
        rate, of_round = _serve(server, [prompts.make(length) for _ in range(requests * concurrency)], concurrency)
        rates.append(rate)
        timings.append(of_round)
        batch = [prompts.token_ids(prompts.make(length)) for _ in range(concurrency)]
        yardstick_rates.append(yardstick.tokens_per_second(batch))
        print(f"  {rate:.0f} and {yardstick_rates[-1]:.0f} tokens/s", file=sys.stderr, flush=True)
    first_tokens = [[timing.first_token for timing in of_round] for of_round in timings]
    gaps = [[gap for timing in of_round for gap in timing.chunk_gaps] for of_round in timings]
    return Cell(
        prompt,
        concurrency,
        statistics.median(rates),
        statistics.median(yardstick_rates),
        _median_ms(first_tokens, 50),
        _median_ms(first_tokens, 99),
        _median_ms(gaps, 50),
        _median_ms(gaps, 99),
        rates,
        yardstick_rates,
    )


def _serve(server: ServerProcess, texts: list[str], concurrency: int) -> tuple[float, list[StreamTiming]]:
    """Output tokens a second over the whole run, and each answer's times."""
    common = {"model": "SmolLM2-135M-Instruct", "max_tokens": OUTPUT_TOKENS, "temperature": 0, "ignore_eos": True}
    bodies = [common | {"prompt": text} for text in texts]

    async def run() -> tuple[float, list[StreamTiming]]:
        loop = asyncio.get_running_loop()
        started = loop.time()
        timings = await run_closed_loop("127.0.0.1", server.port, bodies, concurrency)
        return loop.time() - started, timings

    seconds, timings = asyncio.run(run())
    tokens = sum(timing.completion_tokens for timing in timings)
    if tokens != len(texts) * OUTPUT_TOKENS:
        raise RuntimeError(f"{len(texts)} answers of {OUTPUT_TOKENS} tokens were asked for, {tokens} tokens came")
    return tokens / seconds, timings


def _median_ms(rounds: list[list[float]], percent: float) -> float:
    """The median over the rounds of one percentile of each, in milliseconds."""
    return 1e3 * statistics.median(percentile(seconds, percent) for seconds in rounds)


def percentile(values: list[float], percent: float) -> float:
    """The nearest-rank percentile.

    >>> percentile([3.0, 1.0, 2.0], 50)
    2.0
    """
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def table(cells: list[Cell]) -> str:
    """The cells as a Markdown table."""
    head = (
        "| prompt | concurrency | tandem tok/s | transformers tok/s | times | TTFT ms, median / p99 "
        "| inter-token ms, median / p99 |\n|---|---:|---:|---:|---:|---:|---:|"
    )
    lines = [
        f"| {cell.prompt} ({PROMPT_TOKENS[cell.prompt]}) | {cell.concurrency} | {cell.tokens_per_second:.0f} "
        f"| {cell.transformers_tokens_per_second:.0f} | {cell.ratio:.1f} "
        f"| {cell.first_token_median_ms:.0f} / {cell.first_token_p99_ms:.0f} "
        f"| {cell.inter_token_median_ms:.1f} / {cell.inter_token_p99_ms:.1f} |"
        for cell in cells
    ]
    return "\n".join([head, *lines])


def _machine(threads: int) -> dict[str, Any]:
    from importlib.metadata import version

    processor = platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        models = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        processor = models[0] if models else processor
    return {
        "processor": processor,
        "cores": os.cpu_count(),
        "transformers_threads": threads,
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "transformers")},
    }


if __name__ == "__main__":
    sys.exit(main())
