"""The parts of `make bench`: how each benchmark is run, and which ratios are made of its JSON.

A ratio is of two things that were measured in turns on one machine, the larger the better; what a time was aimed at is
in bench_aims.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Ratios = dict[str, float]


@dataclass(frozen=True, slots=True)
class Part:
    """One benchmark, the module loadtest.bench_NAME. `floor`: no ratio of its short form falls under it, on however
    busy a machine, unless something is broken."""

    flags: Sequence[str]
    short: Sequence[str]
    ratios: Callable[[Any], Ratios]
    floor: float


def serve_ratios(result: Any) -> Ratios:
    """Output tokens a second beside each other server's, and weights and KV cache over the most memory taken."""
    rates = {
        (cell["server"], cell["prompt"], cell["concurrency"]): cell["tokens_per_second"] for cell in result["cells"]
    }
    ratios = {
        f"serve, {prompt} prompts at {concurrency}: rate over {server}": rates["Tandem", prompt, concurrency] / rate
        for (server, prompt, concurrency), rate in rates.items()
        if server != "Tandem"
    }
    memory = result["engine_memory"]
    needed = memory["weights_mb"] + memory["kv_cache_mb"]
    return ratios | {"engine: weights and KV cache over the most memory taken": needed / memory["peak_mb"]}


def start_ratios(result: Any) -> Ratios:
    return {"start: first token of transformers' generate over the server's": result["theirs"] / result["first"]}


def engine_step_ratios(result: Any) -> Ratios:
    """What memory allows over a step, and the model's share of steps."""
    shares = {
        f"engine, {step['rows']} {step['mix']} rows × {step['context']}: the model's share of a step": 1
        - step["outside"]
        for step in result["steps"]
    }
    return {"engine: reading the weights once over a step of one request": 1 / result["floor"]["times"]} | shares


def engine_overhead_ratios(result: Any) -> Ratios:
    """A step's cost besides execution with short contexts over that with long ones."""
    steps = result["steps"]
    short, long = min(steps, key=int), max(steps, key=int)
    ratio = steps[short]["overhead"] / steps[long]["overhead"]
    return {f"engine: a step at {short} tokens of context over one at {long}": ratio}


def structured_ratios(result: Any) -> Ratios:
    return {"structured output: rate over that without a grammar": result["ratio"]}


def quantization_ratios(result: Any) -> Ratios:
    """Tokens a second over bf16's, and bf16's perplexity over theirs."""
    exact, *others = result["engine"].items()
    ratios: Ratios = {}
    for name, values in others:
        ratios[f"{name}: perplexity of bf16 over its own"] = exact[1]["perplexity"] / values["perplexity"]
        for rows in result["rows"]:
            column = f"tok/s at {rows}"
            ratios[f"{name} at {rows}: rate over that of bf16"] = values[column] / exact[1][column]
    return ratios


def sampler_ratios(result: Any) -> Ratios:
    return {
        f"sampler, {cell['rows']} {cell['mix']} rows, logits {cell['logits']}: the textbook's time over it": cell[
            "textbook_ms"
        ]
        / cell["own_ms"]
        for cell in result
    }


def stream_cost_ratios(result: Any) -> Ratios:
    """What each other server costs over what the frontend does."""
    cost = {(cell["server"], cell["pace"], cell["streams"]): cell["chunk_us"] for cell in result["cells"]}
    return {
        f"frontend, {pace} at {streams}: a chunk of {server} over one of ours": chunk_us / cost["Tandem", pace, streams]
        for (server, pace, streams), chunk_us in cost.items()
        if server != "Tandem"
    }


def stream_path_ratios(result: Any) -> Ratios:
    """The cost of a token among few streams over that among many."""
    few, many = min(result, key=int), max(result, key=int)
    return {f"frontend: a token among {few} streams over one among {many}": result[few] / result[many]}


def frontend_ratios(result: Any) -> Ratios:
    """The cost of a token with one engine over that with the most, and memory with few streams over many."""
    cells = {(cell["engines"], cell["streams"]): cell for cell in result["cells"]}
    fewest, most = min(cells), max(cells)
    ratios = {
        f"frontend, {streams} streams: a token from {fewest[0]} engines over one from {most[0]}": cells[
            fewest[0], streams
        ]["frontend_cpu_us"]
        / cell["frontend_cpu_us"]
        for (engines, streams), cell in cells.items()
        if engines == most[0] and streams >= 256
    }
    memory = cells[fewest]["frontend_resident_mb"] / cells[most]["frontend_resident_mb"]
    return ratios | {f"frontend: memory at {fewest[1]} streams over that at {most[1]}": memory}


def loop_lag_ratios(result: Any) -> Ratios:
    """The share of the event loop's lags that are short while long prompts come."""
    return {
        f"frontend: lags within 5 ms beside {cell['clients']} clients with long prompts": 1 - cell["late"]
        for cell in result
    }


PARTS: dict[str, Part] = {
    "serve": Part(
        ["--concurrency", "1", "8", "32", "--requests", "32", "--rounds", "3"],
        ["--concurrency", "8", "--prompts", "short", "--rounds", "3", "--patience", "1"],
        serve_ratios,
        floor=0.3,
    ),
    "start": Part(["--rounds", "3"], ["--rounds", "1"], start_ratios, floor=0.05),
    "engine_step": Part(
        ["--mix", "mixed", "asking", "--steps", "40"],
        ["--rows", "1", "8", "--context", "64", "--steps", "10"],
        engine_step_ratios,
        floor=0.1,
    ),
    "engine_overhead": Part([], ["--requests", "64", "--steps", "50"], engine_overhead_ratios, floor=0.1),
    "structured": Part(["--rounds", "5"], ["--rows", "8", "--steps", "20"], structured_ratios, floor=0.3),
    "quantization": Part([], ["--windows", "1", "--rounds", "1", "--rows", "1"], quantization_ratios, floor=0.3),
    "sampler": Part(
        ["--rows", "1", "32", "256", "--rounds", "10"], ["--rows", "1", "16", "--rounds", "2"], sampler_ratios, floor=3
    ),
    "stream_cost": Part(["--rounds", "3"], ["--rounds", "1", "--streams", "32"], stream_cost_ratios, floor=0.2),
    "stream_path": Part([], ["--streams", "8", "256", "--tokens", "50"], stream_path_ratios, floor=0.1),
    "frontend": Part(
        ["--engines", "1", "2", "4", "--seconds", "5"],
        ["--engines", "1", "2", "--streams", "64", "256", "--seconds", "1"],
        frontend_ratios,
        floor=0.2,
    ),
    "loop_lag": Part(["--seconds", "6"], ["--clients", "1", "--seconds", "2"], loop_lag_ratios, floor=0.3),
}
