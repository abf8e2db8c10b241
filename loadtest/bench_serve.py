"""The speed of `tandem serve` with SmolLM2 in bf16, beside transformers' `generate` and other servers in the same run.

    python -m loadtest.bench_serve [--rounds 3] [--concurrency 1 8 32 64] [--peer vLLM=http://127.0.0.1:9301]

For short and long prompts, 64 tokens out, at each concurrency: output tokens/s, time to first token and
inter-token latency. All take turns, each idle while another runs (a turn begins only when the machine is), and the
medians of several rounds are shown: on a shared machine, one round says little. No two prompts share a beginning, so
that the prefix cache has nothing to give; decoding is greedy. A peer is any server of OpenAI's API that has been
started with the same model in bf16.
"""

import argparse
import math
import random
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path

from loadtest.bench_result import RESULTS, table, write_json
from loadtest.idle_machine import PATIENCE_SECONDS, wait_until_idle
from loadtest.process_memory import EngineMemory, measure_engine_memory
from loadtest.serve_contenders import Contender, Round, Server, TransformersGenerate, parse_peer
from loadtest.server_process import tandem_serve
from services.launcher.smollm2 import ensure_smollm2

PROMPT_TOKENS = {"short": 44, "long": 544}
# Common enough that most are one token.
WORDS = (
    "river mountain window market garden letter silver morning planet engine bridge winter paper station island music "
    "forest doctor village machine history kitchen summer ocean valley picture journey captain library harvest number "
    "water"
)
TANDEM = "Tandem"
KV_CACHE_GIB = 2.0


@dataclass(slots=True)
class Cell:
    """One line of the table. Rates in output tokens a second, times in milliseconds, medians over the rounds; those
    of transformers are None: it streams nothing."""

    prompt: str
    concurrency: int
    server: str
    tokens_per_second: float
    first_token_median_ms: float | None
    first_token_p99_ms: float | None
    inter_token_median_ms: float | None
    inter_token_p99_ms: float | None
    rates: list[float]


class Prompts:
    """Texts of about a given number of tokens, each different from its first words on."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._random = random.Random()  # a server that has been running may remember those of another run
        self._words = WORDS.split()

    def make(self, tokens: int, count: int) -> list[str]:
        texts: list[str] = []
        for _ in range(count):
            words = [f"Note {self._random.randrange(10**6)}:", *self._random.choices(self._words, k=tokens)]
            texts.append(self._tokenizer.decode(self.token_ids(" ".join(words))[:tokens]))
        return texts

    def token_ids(self, text: str) -> list[int]:
        return self._tokenizer(text)["input_ids"]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="how often each cell is measured (default 3)")
    parser.add_argument("--requests", type=int, default=64, help="of a round at most, where the concurrency is less")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--prompts", nargs="+", choices=list(PROMPT_TOKENS), default=list(PROMPT_TOKENS))
    parser.add_argument(
        "--patience", type=float, default=PATIENCE_SECONDS, help="how long a turn waits for an idle machine, in seconds"
    )
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=URL", help="a server to measure beside")
    parser.add_argument("--no-transformers", action="store_true", help="leave transformers out")
    parser.add_argument("--serve-flags", nargs=argparse.REMAINDER, default=[], help="the rest goes to tandem serve")
    parser.add_argument("--output", type=Path, default=RESULTS / "bench_serve.json")
    options = parser.parse_args(arguments)

    peers = [parse_peer(argument) for argument in options.peer]
    folder = ensure_smollm2()
    prompts = Prompts(folder)
    print("Starting …", file=sys.stderr, flush=True)
    with ExitStack() as running:
        scratch = running.enter_context(tempfile.TemporaryDirectory(prefix="tandem-bench-"))
        flags = ["--dtype", "bfloat16", "--kv-cache-memory", str(KV_CACHE_GIB), *options.serve_flags]
        process = running.enter_context(tandem_serve(Path(scratch), *flags))
        contenders: list[Contender] = [Server(TANDEM, "127.0.0.1", process.port, folder.name), *peers]
        if not options.no_transformers:
            contenders.append(running.enter_context(closing(TransformersGenerate(folder, prompts.token_ids))))
        cells: list[Cell] = []
        for prompt in options.prompts:
            for concurrency in options.concurrency:
                count = max(concurrency, min(max(2 * concurrency, 4), options.requests))
                cells += _measure(contenders, prompts, prompt, concurrency, options.rounds, count, options.patience)
        memory = measure_engine_memory(process.engines[0]["pid"], folder, KV_CACHE_GIB)
    print(f"{as_table(cells)}\n\n{memory_line(memory)}")
    result = {"rounds": options.rounds, "cells": [asdict(cell) for cell in cells], "engine_memory": asdict(memory)}
    write_json(options.output, result)
    return 0


def _measure(
    contenders: list[Contender],
    prompts: Prompts,
    prompt: str,
    concurrency: int,
    rounds: int,
    count: int,
    patience: float,
) -> list[Cell]:
    length = PROMPT_TOKENS[prompt]
    for contender in contenders:
        if isinstance(contender, Server):
            contender.run(prompts.make(length, concurrency), concurrency)  # warm up
    done: dict[str, list[Round]] = {contender.name: [] for contender in contenders}
    for number in range(rounds):
        print(f"{prompt} prompts, concurrency {concurrency}, round {number + 1}:", end="", file=sys.stderr, flush=True)
        for contender in contenders:
            texts = prompts.make(length, count)
            wait_until_idle(patience)
            of_round = contender.run(texts, concurrency)
            done[contender.name].append(of_round)
            print(f" {contender.name} {of_round.tokens_per_second:.0f}", end="", file=sys.stderr, flush=True)
        print(" tokens/s", file=sys.stderr, flush=True)
    return [_cell(prompt, concurrency, name, of_server) for name, of_server in done.items()]


def _cell(prompt: str, concurrency: int, name: str, rounds: list[Round]) -> Cell:
    rates = [each.tokens_per_second for each in rounds]
    first_tokens = [[timing.first_token for timing in each.timings] for each in rounds]
    gaps = [[gap for timing in each.timings for gap in timing.chunk_gaps] for each in rounds]
    return Cell(
        prompt,
        concurrency,
        name,
        statistics.median(rates),
        _median_ms(first_tokens, 50),
        _median_ms(first_tokens, 99),
        _median_ms(gaps, 50),
        _median_ms(gaps, 99),
        rates,
    )


def _median_ms(rounds: list[list[float]], percent: float) -> float | None:
    """The median over the rounds of one percentile of each, in milliseconds. None: nothing was streamed."""
    if not rounds[0]:
        return None
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


def as_table(cells: list[Cell]) -> str:
    """`times`: Tandem's rate over the line's."""
    header = (
        "prompt|concurrency|server|tok/s|Tandem, times|first token ms, median / p99|between tokens ms, median / p99"
    )
    own = {(cell.prompt, cell.concurrency): cell.tokens_per_second for cell in cells if cell.server == TANDEM}

    def pair(median: float | None, p99: float | None, digits: int) -> str:
        return "–" if median is None or p99 is None else f"{median:.{digits}f} / {p99:.{digits}f}"

    rows = [
        (
            f"{cell.prompt} ({PROMPT_TOKENS[cell.prompt]})",
            cell.concurrency,
            f"**{cell.server}**" if cell.server == TANDEM else cell.server,
            f"{cell.tokens_per_second:.0f}",
            f"{own[cell.prompt, cell.concurrency] / cell.tokens_per_second:.2f}",
            pair(cell.first_token_median_ms, cell.first_token_p99_ms, 0),
            pair(cell.inter_token_median_ms, cell.inter_token_p99_ms, 1),
        )
        for cell in cells
    ]
    return table(header.split("|"), rows)


def memory_line(memory: EngineMemory) -> str:
    """What the engine's process took at most, in words."""
    return (
        f"The engine's process took {memory.peak_mb:.0f} MB at most, {memory.torch_mb:.0f} of which it takes to import "
        f"PyTorch: {memory.ratio:.2f} times its {memory.weights_mb:.0f} MB of weights and {memory.kv_cache_mb:.0f} MB "
        "of KV cache."
    )


if __name__ == "__main__":
    sys.exit(main())
