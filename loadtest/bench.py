"""All benchmarks in one run of about a quarter of an hour, next to the last run that was committed: `make bench`.

    python -m loadtest.bench [--only serve stream_cost …] [--write-docs] [--write-baseline]

Each part writes its own JSON under loadtest/results; bench.json there holds what is compared: ratios of two things that
were measured in turn on one machine, the larger the better, since a time alone says more of the machine than of the
code. One that has fallen by more than 15% since loadtest/baseline.json is shown in red. `--write-docs` puts the tables
and the plot into docs/performance.md, between the comments that name them.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest.server_process import ROOT

RESULTS = ROOT / "loadtest" / "results"
BASELINE = ROOT / "loadtest" / "baseline.json"
DOCUMENT = ROOT / "docs" / "performance.md"
LARGEST_FALL = 0.15
IN_DOCUMENT = ("serve", "stream_cost", "frontend")

Ratios = dict[str, float]


@dataclass(frozen=True, slots=True)
class Part:
    """One benchmark: its module's flags, and what is made of its JSON."""

    flags: Sequence[str]
    ratios: Callable[[Any], Ratios]


def serve_ratios(result: Any) -> Ratios:
    """Output tokens a second beside transformers', and weights and KV cache over the most that the engine took."""
    rates = {
        (cell["server"], cell["prompt"], cell["concurrency"]): cell["tokens_per_second"] for cell in result["cells"]
    }
    ratios = {
        f"serve, {prompt} prompts at {concurrency}: rate over transformers'": rate
        / rates["transformers", prompt, concurrency]
        for (server, prompt, concurrency), rate in rates.items()
        if server == "Tandem"
    }
    memory = result["engine_memory"]
    needed = memory["weights_mb"] + memory["kv_cache_mb"]
    return ratios | {"engine: weights and KV cache over the most memory taken": needed / memory["peak_mb"]}


def stream_cost_ratios(result: Any) -> Ratios:
    """What a server costs that does nothing but send, over what the frontend does."""
    cost = {(cell["server"], cell["pace"], cell["streams"]): cell["chunk_us"] for cell in result["cells"]}
    return {
        f"frontend, {pace} at {streams}: FastAPI's constant chunk over a chunk": cost[
            "constant, FastAPI", pace, streams
        ]
        / chunk_us
        for (server, pace, streams), chunk_us in cost.items()
        if server == "tandem"
    }


def stream_path_ratios(result: Any) -> Ratios:
    """The cost of a token among few streams over that among many."""
    few, many = min(result, key=int), max(result, key=int)
    return {f"frontend: a token among {few} streams over one among {many}": result[few] / result[many]}


def fleet_ratios(result: Any) -> Ratios:
    """The cost of a token with one engine over that with the most."""
    cost = {(cell["engines"], cell["streams"]): cell["frontend_cpu_us"] for cell in result["cells"]}
    most = max(engines for engines, _ in cost)
    return {
        f"frontend, {streams} streams: a token from 1 engine over one from {most}": cost[1, streams]
        / cost[most, streams]
        for engines, streams in cost
        if engines == most and streams >= 256
    }


def engine_overhead_ratios(result: Any) -> Ratios:
    """A step's cost besides execution with short contexts over that with long ones."""
    short, long = min(result, key=int), max(result, key=int)
    return {f"engine: a step at {short} tokens of context over one at {long}": result[short] / result[long]}


def loop_lag_ratios(result: Any) -> Ratios:
    """The share of the event loop's lags that are short while long prompts come."""
    return {
        f"frontend: lags within 5 ms beside {cell['clients']} clients with long prompts": 1 - cell["late"]
        for cell in result
    }


PARTS: dict[str, Part] = {
    "serve": Part(["--concurrency", "1", "8", "32", "--requests", "32"], serve_ratios),
    "stream_cost": Part(["--rounds", "3"], stream_cost_ratios),
    "frontend": Part(["--engines", "1", "2", "4", "--seconds", "5"], fleet_ratios),
    "loop_lag": Part(["--clients", "1", "--seconds", "5"], loop_lag_ratios),
    "stream_path": Part([], stream_path_ratios),
    "engine_overhead": Part([], engine_overhead_ratios),
}


def compare(ratios: Ratios, baseline: Ratios, color: bool = True) -> tuple[str, list[str]]:
    """A table of the ratios beside those of the baseline, and the names of those that fell too far.

    >>> print(compare({"a": 1.0, "b": 2.0}, {"a": 2.0}, color=False)[0])
        ratio  baseline   change
         1.00      2.00     -50%  a
         2.00         –           b
    """
    lines = [f"{'ratio':>9} {'baseline':>9} {'change':>8}"]
    fallen: list[str] = []
    for name, ratio in ratios.items():
        before = baseline.get(name)
        if before is None:
            lines.append(f"{ratio:>9.2f} {'–':>9} {'':>8}  {name}")
            continue
        line = f"{ratio:>9.2f} {before:>9.2f} {ratio / before - 1:>+8.0%}  {name}"
        if ratio < (1 - LARGEST_FALL) * before:
            fallen.append(name)
            line = f"\033[31m{line}\033[0m" if color else line
        lines.append(line)
    return "\n".join(lines), fallen


def run_part(name: str, part: Part) -> tuple[Any, str]:
    """The part's JSON, and the table that it printed. Raises CalledProcessError where it failed."""
    output = RESULTS / f"bench_{name}.json"
    command = [sys.executable, "-m", f"loadtest.bench_{name}", *part.flags, "--output", str(output)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(output.read_text(encoding="utf-8")), done.stdout


def fleet_plot(result: Any) -> str:
    """CPU time a token over the number of streams, a line for each number of engines, for the document."""
    cells = result["cells"]
    streams = sorted({cell["streams"] for cell in cells})
    lines = ["```mermaid", "xychart-beta", '    title "Frontend CPU µs a token; lines: number of engines"']
    lines += [f'    x-axis "streams" [{", ".join(map(str, streams))}]', '    y-axis "µs" 0 --> 40']
    for engines in sorted({cell["engines"] for cell in cells}):
        costs = [cell["frontend_cpu_us"] for cell in cells if cell["engines"] == engines]
        lines.append(f"    line [{', '.join(f'{cost:.1f}' for cost in costs)}]")
    return "\n".join([*lines, "```"])


def servers_in(text: str) -> set[str]:
    """What stands in the column "server" of a Markdown table.

    >>> sorted(servers_in("| n | server |\\n|---|---|\\n| 1 | **a** |\\n| 1 | b |"))
    ['a', 'b']
    """
    rows = [[cell.strip(" *") for cell in line.split("|")] for line in text.splitlines() if line.startswith("|")]
    if not rows or "server" not in rows[0]:
        return set()
    column = rows[0].index("server")
    return {row[column] for row in rows[2:]}


def write_block(document: Path, name: str, text: str) -> set[str]:
    """Replace what is between the comments `<!-- bench NAME -->` and `<!-- end -->`. Raises ValueError.

    Returns the servers that were measured for what stands there, but not for `text`, a peer that takes some setting up
    for one: then nothing is replaced.
    """
    content = document.read_text(encoding="utf-8")
    pattern = re.compile(rf"(<!-- bench {re.escape(name)} -->\n)(.*?)(<!-- end -->)", re.DOTALL)
    found = pattern.findall(content)
    if len(found) != 1:
        raise ValueError(f"{document} has {len(found)} places for bench {name}; one is expected")
    lost = servers_in(found[0][1]) - servers_in(text)
    if not lost:
        replaced = pattern.sub(lambda match: f"{match[1]}\n{text.strip()}\n\n{match[3]}", content)
        document.write_text(replaced, encoding="utf-8")
    return lost


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--write-docs", action="store_true", help="put the tables and the plot into the document")
    parser.add_argument("--write-baseline", action="store_true", help="make this run the one to compare with")
    options = parser.parse_args(arguments)
    RESULTS.mkdir(parents=True, exist_ok=True)
    ratios: Ratios = {}
    for name in options.only:
        print(f"\n== {name}", flush=True)
        began = time.monotonic()
        result, table = run_part(name, PARTS[name])
        print(table + f"({time.monotonic() - began:.0f} s)", flush=True)
        ratios |= PARTS[name].ratios(result)
        if options.write_docs and name in IN_DOCUMENT:
            lost = write_block(DOCUMENT, name, table + ("\n" + fleet_plot(result) if name == "frontend" else ""))
            if lost:
                print(f"{DOCUMENT} keeps its table, which has {', '.join(sorted(lost))} too.", flush=True)
    machine = {"cores": os.cpu_count(), "python": platform.python_version(), "load_average": os.getloadavg()[0]}
    record = json.dumps({"machine": machine, "ratios": ratios}, indent=2) + "\n"
    (RESULTS / "bench.json").write_text(record, encoding="utf-8")
    baseline: Ratios = json.loads(BASELINE.read_text(encoding="utf-8"))["ratios"] if BASELINE.exists() else {}
    if options.write_baseline:
        merged = {"machine": machine, "ratios": baseline | {name: round(value, 3) for name, value in ratios.items()}}
        BASELINE.write_text(json.dumps(merged, indent=2) + "\n", encoding="utf-8")
    comparison, fallen = compare(ratios, baseline, color=sys.stdout.isatty())
    print(f"\n{comparison}")
    if fallen:
        print(f"\n{len(fallen)} of {len(ratios)} ratios fell by more than {LARGEST_FALL:.0%}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
