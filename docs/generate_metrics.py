"""Writes the tables of docs/metrics.md from the services' catalogues: `make docs`. A test holds them together."""

import sys
from collections.abc import Iterable
from pathlib import Path

from services.engine.metric_catalogue import CATALOGUE as ENGINE
from services.frontend.metrics.catalogue import CATALOGUE as FRONTEND
from shared.metrics import Metric

DOCUMENT = Path(__file__).with_name("metrics.md")
_START, _END = "<!-- generated: {} -->", "<!-- end -->"
_PLACES: dict[str, tuple[tuple[Metric, ...], str]] = {
    "genai": (FRONTEND, "gen_ai_"),
    "frontend": (FRONTEND, "tandem_"),
    "engine": (ENGINE, "tandem_"),
}


def with_tables(document: str) -> str:
    """The document with every table made anew. Raises ValueError where a place for one is missing."""
    for name, (catalogue, prefix) in _PLACES.items():
        before, found, rest = document.partition(_START.format(name))
        _, ended, after = rest.partition(_END)
        if not found or not ended:
            raise ValueError(f"{DOCUMENT.name} has no place for the table {name!r}")
        table = _table(metric for metric in catalogue if metric.name.startswith(prefix))
        document = f"{before}{found}\n{table}\n{ended}{after}"
    return document


def _table(metrics: Iterable[Metric]) -> str:
    lines = ["| name | type | unit | labels | what it is |", "|---|---|---|---|---|"]
    for metric in metrics:
        labels = "<br>".join(f"`{label}`" for label in metric.labels)
        text = metric.text
        if metric.buckets:
            text += f" Bounds: {', '.join(f'{bound:.10g}' for bound in metric.buckets)}."
        lines.append(f"| `{metric.name}` | {metric.kind} | {_unit(metric.name)} | {labels} | {text} |")
    return "\n".join(lines)


def _unit(name: str) -> str:
    name = name.removesuffix("_total").removesuffix("_per_second")
    if name == "gen_ai_server_token_usage":
        return "tokens"
    for unit in ("seconds", "bytes", "ratio", "tokens", "requests", "messages"):
        if name.endswith(f"_{unit}"):
            return "ratio (0 to 1)" if unit == "ratio" else unit
    return ""


def main() -> int:
    DOCUMENT.write_text(with_tables(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
