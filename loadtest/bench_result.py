"""What the benchmarks have in common: a table in Markdown, and a file of JSON with all the numbers."""

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from loadtest.server_process import ROOT

RESULTS = ROOT / "loadtest" / "results"
_NUMBER = re.compile(r"[\d.,+±%/ –-]*")


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table, whose columns of numbers are aligned to the right.

    >>> print(table(["server", "ms"], [["**one**", 1], ["other", "2 / 3"]]))
    | server | ms |
    |---|---:|
    | **one** | 1 |
    | other | 2 / 3 |
    """
    lines = [[str(cell) for cell in row] for row in rows]
    numeric = [all(_NUMBER.fullmatch(cell.strip("*")) for cell in column) for column in zip(*lines, strict=True)]
    rule = "|" + "|".join("---:" if right else "---" for right in numeric) + "|"
    head, *body = ("| " + " | ".join(row) + " |" for row in (header, *lines))
    return "\n".join([head, rule, *body])


def write_json(path: Path, result: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
