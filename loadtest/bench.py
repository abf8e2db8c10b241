"""All benchmarks in one run of about a quarter of an hour, next to the last run that was committed: `make bench`.

    python -m loadtest.bench [--only serve stream_cost …] [--peer vLLM=http://127.0.0.1:9301]
    python -m loadtest.bench --short

The parts (bench_parts) run one after another, each in a process of its own, and write all their numbers to
loadtest/results. Their tables and plots go into docs/performance.md; their ratios and what was aimed at
(bench_aims) into loadtest/bench.json, and beside those of the last commit: what has fallen by more than 15% is shown in
red. To commit both is to make this run the one to compare with. A part that fails is named at the end and takes nothing
from the others.

The short form takes a minute or two and writes neither: it fails where a ratio is under a floor that any machine
keeps.
"""

import argparse
import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from loadtest.bench_aims import AIMS, Aim
from loadtest.bench_aims import as_table as aims_table
from loadtest.bench_document import PLOTS, write_block
from loadtest.bench_parts import PARTS, Ratios
from loadtest.bench_result import RESULTS, write_json
from loadtest.serve_contenders import parse_peer
from loadtest.server_process import ROOT

RECORD = ROOT / "loadtest" / "bench.json"
DOCUMENT = ROOT / "docs" / "performance.md"
LARGEST_FALL = 0.15
PART_SECONDS = 900
PATIENCE_SECONDS = 60  # of a part that is to end its servers


def compare(ratios: Ratios, committed: Ratios, color: bool = True) -> tuple[str, list[str]]:
    """A table of the ratios beside those of the last commit, and the names of those that fell too far.

    >>> print(compare({"a": 1.0, "b": 2.0}, {"a": 2.0}, color=False)[0])
        ratio committed   change
         1.00      2.00     -50%  a
         2.00         –           b
    """
    lines = [f"{'ratio':>9} {'committed':>9} {'change':>8}"]
    fallen: list[str] = []
    for name, ratio in ratios.items():
        before = committed.get(name)
        if before is None:
            lines.append(f"{ratio:>9.2f} {'–':>9} {'':>8}  {name}")
            continue
        line = f"{ratio:>9.2f} {before:>9.2f} {ratio / before - 1:>+8.0%}  {name}"
        if ratio < (1 - LARGEST_FALL) * before:
            fallen.append(name)
            line = f"\033[31m{line}\033[0m" if color else line
        lines.append(line)
    return "\n".join(lines), fallen


def run_part(name: str, flags: Sequence[str]) -> tuple[Any, str]:
    """The part's JSON, and the tables that it printed. Raises CalledProcessError or TimeoutExpired."""
    output = RESULTS / f"bench_{name}.json"
    output.unlink(missing_ok=True)
    command = [sys.executable, "-m", f"loadtest.bench_{name}", *flags, "--output", str(output)]
    printed = run_bounded(command, PART_SECONDS)
    return json.loads(output.read_text(encoding="utf-8")), printed


def run_bounded(command: Sequence[str], seconds: float) -> str:
    """What it prints. Nothing that it started outlives it. Raises CalledProcessError or TimeoutExpired."""

    def heed_interrupts() -> None:
        """What a shell runs in the background ignores them, and so would the part."""
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True, preexec_fn=heed_interrupts
    ) as process:
        try:
            printed, _ = process.communicate(timeout=seconds)
        finally:
            _end_group(process)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command, printed)
    return printed


def _end_group(process: subprocess.Popen[str]) -> None:
    """Ctrl-C, at which a part ends the servers that it has in groups of their own; then what is left is killed."""
    with contextlib.suppress(subprocess.TimeoutExpired, ProcessLookupError):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
            process.wait(PATIENCE_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def last_committed() -> dict[str, Any]:
    """The record of the last commit; what lies on the disk where this is no clone or has none."""
    show = ["git", "show", f"HEAD:{RECORD.relative_to(ROOT)}"]
    try:
        return json.loads(subprocess.run(show, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
    except (OSError, subprocess.CalledProcessError):
        return on_record()


def machine() -> dict[str, Any]:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "date": time.strftime("%Y-%m-%d"),
        "processor": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "load_average_before": round(os.getloadavg()[0], 2),
    }


def on_record() -> dict[str, Any]:
    """What lies on the disk: `machine` of the last run of all parts, and of each part `ratios` and `aims`."""
    return json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {"machine": None, "parts": {}}


def keep(name: str, result: Any, tables: str) -> None:
    """Put a part's numbers into document and record. A table of servers that this run did not measure stays as it is,
    and its record with it."""
    plots = PLOTS[name](result) if name in PLOTS else ""
    if lost := write_block(DOCUMENT, name, f"{tables}\n{plots}"):
        print(f"{DOCUMENT} keeps its table, which has {', '.join(sorted(lost))} too.", flush=True)
        return
    record = on_record()
    record["parts"][name] = {
        "ratios": {ratio: round(value, 3) for ratio, value in PARTS[name].ratios(result).items()},
        "aims": [asdict(aim) for aim in AIMS[name](result)] if name in AIMS else [],
    }
    record["parts"] = {part: record["parts"][part] for part in PARTS if part in record["parts"]}
    write_json(RECORD, record)


def summary(record: dict[str, Any]) -> str:
    """What was aimed at, and where all of it was last measured in one run."""
    aims = [Aim(**aim) for part in record["parts"].values() for aim in part["aims"]]
    facts = record["machine"]
    if facts is None:
        return aims_table(aims)
    return (
        f"The last run of all parts: {facts['date']}, {facts['cores']} cores of {facts['processor']}, Python "
        f"{facts['python']}, PyTorch {facts['torch']}, {facts['minutes']:.0f} minutes.\n\n{aims_table(aims)}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--short", action="store_true", help="a minute or two; fails where a ratio is under its floor")
    parser.add_argument(
        "--peer", action="append", default=[], metavar="NAME=URL", help="for serve, as bench_serve has it"
    )
    parser.add_argument(
        "--frontend-peer",
        nargs=4,
        action="append",
        default=[],
        metavar=("NAME", "PACE", "PORT", "PID"),
        help="for stream_cost, as bench_stream_cost's --peer",
    )
    options = parser.parse_args(arguments)
    try:
        for peer in options.peer:
            parse_peer(peer)
    except (ValueError, OSError) as error:  # told before anything is measured
        parser.error(f"--peer {error}")
    peers = {
        "serve": [word for peer in options.peer for word in ("--peer", peer)],
        "stream_cost": [word for peer in options.frontend_peer for word in ("--peer", *peer)],
    }
    facts, began = machine(), time.monotonic()
    ratios: Ratios = {}
    failures: list[str] = []
    for name in options.only:
        print(f"\n== {name}", flush=True)
        part, part_began = PARTS[name], time.monotonic()
        try:
            flags = part.short if options.short else part.flags
            result, tables = run_part(name, [*flags, *peers.get(name, ())])
            print(tables + f"({time.monotonic() - part_began:.0f} s)", flush=True)
            of_part = part.ratios(result)
            ratios |= of_part
            if options.short:
                failures += [f"{ratio}: {value:.2f}" for ratio, value in of_part.items() if value < part.floor]
            else:
                keep(name, result, tables)
        except Exception:  # what the other parts measure is not lost
            traceback.print_exc()
            failures.append(f"{name} failed; its message is above")
    committed = {
        ratio: value for part in last_committed().get("parts", {}).values() for ratio, value in part["ratios"].items()
    }
    comparison, fallen = compare(ratios, committed, color=sys.stdout.isatty())
    print(f"\n{comparison}")
    if fallen:
        print(f"\n{len(fallen)} of {len(ratios)} ratios fell by more than {LARGEST_FALL:.0%}.")
    if not options.short:
        record = on_record()
        if options.only == list(PARTS) and not failures:
            record["machine"] = facts | {"minutes": round((time.monotonic() - began) / 60, 1)}
            write_json(RECORD, record)
        write_block(DOCUMENT, "aims", summary(record))
    print("".join(f"\nFAILED: {failure}" for failure in failures))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
