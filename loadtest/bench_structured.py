"""What structured output costs: decode steps with and without a grammar, and the wait for the first token.

    python -m loadtest.bench_structured [--rows 32] [--steps 100] [--rounds 3]

SmolLM2 in bf16 on the CPU, the engine's own scheduler, executor and sampler in this process; the schema is nested and
has 50 properties. Rounds with and without it take turns, so that a machine that slows down slows both.
"""

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loadtest.bench_result import RESULTS, table, write_json
from services.engine.core import EngineCore
from services.engine.executor.torch_executor import TorchExecutor
from services.engine.settings import EngineSettings
from services.frontend.structured import GrammarChecker
from services.launcher.smollm2 import ensure_smollm2
from shared.protocol import Add, pack_token_ids
from shared.sampling_params import SamplingParams
from shared.structured_output import StructuredOutput

PEER = b"bench"
PROMPT_TOKENS = 64


def nested_schema(name: str = "section") -> dict[str, Any]:
    """Ten objects of five properties each, of every usual kind."""
    sections: dict[str, Any] = {}
    for number in range(10):
        sections[f"{name}_{number}"] = closed(
            {
                f"name_{number}": {"type": "string", "maxLength": 40},
                f"count_{number}": {"type": "integer", "minimum": 0, "maximum": 1000},
                f"kind_{number}": {"enum": ["red", "green", "blue"]},
                f"tags_{number}": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 3},
                f"active_{number}": {"type": "boolean"},
            }
        )
    return closed(sections)


def closed(properties: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def structured(name: str = "section") -> StructuredOutput:
    return StructuredOutput(kind="json_schema", value=json.dumps(nested_schema(name)))


def add(core: EngineCore, request_id: int, output: StructuredOutput | None, max_tokens: int) -> None:
    prompt = [(request_id * 31 + 7 * position) % 40_000 + 100 for position in range(PROMPT_TOKENS)]
    sampling = SamplingParams(
        temperature=1.0, seed=request_id, max_tokens=max_tokens, ignore_eos=True, structured_output=output
    )
    core.add(PEER, Add(request_id, pack_token_ids(prompt), sampling))


def step(core: EngineCore) -> None:
    while not core.has_work:
        time.sleep(0.0002)
    core.step()


def decode_rate(core: EngineCore, rows: int, steps: int, output: StructuredOutput | None) -> float:
    """Tokens a second over `steps` steps in which all rows decode."""
    for request_id in range(rows):
        add(core, request_id, output, max_tokens=1000)
    while len(core.scheduler.running) < rows or any(r.num_output_tokens < 2 for r in core.scheduler.running):
        step(core)
    began = time.perf_counter()
    for _ in range(steps):
        step(core)
    seconds = time.perf_counter() - began
    assert len(core.scheduler.running) == rows, "a request ended while it was measured"
    core.abort_peer(PEER)
    return rows * steps / seconds


def first_token(core: EngineCore, output: StructuredOutput | None) -> float:
    """Milliseconds from ADD to the first output, with nothing else running."""
    began = time.perf_counter()
    add(core, 1, output, max_tokens=2)
    generated = core.statistics.generated_tokens
    while core.statistics.generated_tokens == generated:
        step(core)
    elapsed = time.perf_counter() - began
    core.abort_peer(PEER)
    return 1000 * elapsed


async def check_times() -> tuple[float, float]:
    """Milliseconds in which a frontend checks a schema, the first time and again; medians."""
    checker = GrammarChecker(128 * 1024, 0.5)
    try:
        await checker.check(structured("warm"))
        times: dict[bool, list[float]] = {True: [], False: []}
        for number in range(10):
            for first in (True, False):
                began = time.perf_counter()
                await checker.check(structured(f"checked_{number}"))
                times[first].append(1000 * (time.perf_counter() - began))
        return statistics.median(times[True]), statistics.median(times[False])
    finally:
        await checker.close()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=RESULTS / "bench_structured.json")
    options = parser.parse_args(arguments)
    values: dict[str, Any] = {"model": str(ensure_smollm2()), "device": "cpu", "enable_prefix_caching": False}
    settings = EngineSettings(**values)
    core = EngineCore(TorchExecutor(settings), settings)
    decode_rate(core, options.rows, 5, structured())  # reads the vocabulary

    plain, constrained = [], []
    for _ in range(options.rounds):
        plain.append(decode_rate(core, options.rows, options.steps, None))
        constrained.append(decode_rate(core, options.rows, options.steps, structured()))
    ratios = [one / other for one, other in zip(constrained, plain, strict=True)]
    ratio = statistics.median(ratios)

    none, first, again = [], [], []
    for number in range(9):
        none.append(first_token(core, None))
        first.append(first_token(core, structured(f"first_{number}")))
        again.append(first_token(core, structured(f"first_{number}")))
    core.close()
    check_first, check_again = asyncio.run(check_times())
    print(
        f"{options.rows} rows, {options.steps} steps, medians of {options.rounds} rounds; and of 9 first tokens, with "
        "what a frontend's check of the schema adds:\n"
    )
    rows = [
        ("none", f"{statistics.median(plain):.0f}", "–", f"{statistics.median(none):.1f}", "–"),
        (
            "schema, first use",
            f"{statistics.median(constrained):.0f}",
            f"{ratio:.1%}",
            f"{statistics.median(first):.1f}",
            f"{check_first:.1f}",
        ),
        ("schema, again", "–", "–", f"{statistics.median(again):.1f}", f"{check_again:.1f}"),
    ]
    print(table(["grammar", "tok/s", "of the rate without", "first token ms", "check ms"], rows))
    write_json(options.output, {"ratio": ratio, "ratios": ratios, "plain": plain, "constrained": constrained})


if __name__ == "__main__":
    main()
