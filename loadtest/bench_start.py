"""How long a server takes from its command to the first token, beside the same by transformers without a server.

    python -m loadtest.bench_start [--rounds 3]

SmolLM2 in bf16 with a warm file cache; both take turns. transformers: a Python process that imports it, loads the model
and generates one token, with no tokenizer and no HTTP.
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from loadtest.bench_result import RESULTS, table, write_json
from loadtest.serve_contenders import TransformersGenerate
from loadtest.server_process import tandem_serve
from loadtest.stream_client import timed_completion
from services.launcher.smollm2 import NAME, ensure_smollm2

PROMPT = "The capital of France is"


def tandem_seconds(scratch: Path) -> tuple[float, float]:
    """Until the server says that it is ready, and until the first token."""
    began = time.perf_counter()
    with tandem_serve(scratch, "--dtype", "bfloat16") as server:
        ready = time.perf_counter()
        body = {"model": NAME, "prompt": PROMPT, "max_tokens": 2, "ignore_eos": True}
        timing = asyncio.run(timed_completion("127.0.0.1", server.port, body))
        return ready - began, ready - began + timing.first_token


def transformers_seconds(model: Path) -> float:
    """Until one token was generated."""
    began = time.perf_counter()
    with closing(TransformersGenerate(model, lambda text: [504, 3575, 282, 4649, 314])) as generate:
        generate.run([PROMPT], 1, max_tokens=1)
        return time.perf_counter() - began


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=RESULTS / "bench_start.json")
    options = parser.parse_args(arguments)
    model = ensure_smollm2()
    ready: list[float] = []
    first: list[float] = []
    theirs: list[float] = []
    for number in range(options.rounds + 1):
        with tempfile.TemporaryDirectory(prefix="tandem-bench-") as scratch:
            own, other = tandem_seconds(Path(scratch)), transformers_seconds(model)
        print(f"round {number}: {own[1]:.1f} s, transformers {other:.1f} s", file=sys.stderr, flush=True)
        if number:  # the first one fills the file cache
            ready.append(own[0])
            first.append(own[1])
            theirs.append(other)
    result = {name: statistics.median(each) for name, each in (("ready", ready), ("first", first), ("theirs", theirs))}
    rows = [
        ("**Tandem**", f"{result['ready']:.1f}", f"{result['first']:.1f}"),
        ("transformers", "–", f"{result['theirs']:.1f}"),
    ]
    print(table(["server", "ready s", "first token s"], rows))
    write_json(options.output, result)


if __name__ == "__main__":
    main()
