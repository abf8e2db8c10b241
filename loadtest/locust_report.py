"""A page with plots of a locust run: `python -m loadtest.locust_report results/run` reads results/run_tokens.csv and
results/run_stats.csv (locust's `--csv results/run`) and writes results/run_report.html, one file with all in it."""

import argparse
import base64
import csv
import html
import io
from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

Row = dict[str, str]

PLOTS = [
    ("tokens_per_second", "Output tokens per second", "tokens/s"),
    ("ttft_mean_ms", "Time to first token, mean of each interval", "ms"),
    ("itl_mean_ms", "Inter-token latency, mean of each interval", "ms"),
]
STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}
table{border-collapse:collapse}td,th{padding:.3rem .8rem;text-align:right;border-bottom:1px solid #ddd}
td:first-child,th:first-child{text-align:left}img{width:100%}.bad{color:#b00}"""


def read_rows(path: Path) -> list[Row]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def by_scenario(rows: list[Row]) -> dict[str, list[Row]]:
    scenarios: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        scenarios[row["scenario"]].append(row)
    return dict(scenarios)


def plot(scenarios: dict[str, list[Row]], column: str, title: str, unit: str, bucket: float = 5.0) -> str:
    """One line a scenario over the run's seconds, as an <img> with its data inside. Averages of `bucket` seconds."""
    figure, axes = plt.subplots(figsize=(9, 3.2), layout="constrained")
    start = min(float(rows[0]["timestamp"]) for rows in scenarios.values())
    for name, rows in scenarios.items():
        buckets: dict[int, list[float]] = defaultdict(list)
        for row in rows:
            value = float(row[column])
            # A latency of 0 is an interval in which nothing was measured; a rate of 0 is a rate.
            if value or column == "tokens_per_second":
                buckets[int((float(row["timestamp"]) - start) // bucket)].append(value)
        points = sorted((index * bucket, sum(values) / len(values)) for index, values in buckets.items())
        axes.plot([x for x, _ in points], [y for _, y in points], label=name)
    axes.set(title=title, ylabel=unit, xlabel="seconds")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=130)
    plt.close(figure)
    return f'<img alt="{html.escape(title)}" src="data:image/png;base64,{base64.b64encode(image.getvalue()).decode()}">'


def table(header: list[str], rows: list[list[Any]]) -> str:
    cells = lambda tag, row: "".join(f"<{tag}>{html.escape(str(cell))}</{tag}>" for cell in row)  # noqa: E731
    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f"<table><tr>{cells('th', header)}</tr>{body}</table>"


def report(tokens: list[Row], stats: list[Row]) -> str:
    """The page. Raises ValueError where the run has no tokens."""
    if not tokens:
        raise ValueError("the run has no streamed tokens: did any request succeed?")
    scenarios = by_scenario(tokens)
    seconds = float(tokens[-1]["timestamp"]) - float(tokens[0]["timestamp"])
    failures = {row["Name"]: int(row["Failure Count"]) for row in stats if row["Type"] == "POST"}
    lines = []
    for name, rows in scenarios.items():
        last = rows[-1]
        rate = int(last["tokens"]) / max(seconds, 1e-6)
        percentiles = [f"{float(last[c]):.0f}" for c in ("ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms")]
        lines.append([name, last["streams"], failures.get(name, 0), last["tokens"], f"{rate:.1f}", *percentiles])
    header = ["scenario", "streams", "failed", "tokens", "tokens/s", "TTFT p50", "TTFT p99", "ITL p50", "ITL p99"]
    failed = sum(failures.values())
    verdict = f'<p class="bad">{failed} requests failed.</p>' if failed else "<p>No request failed.</p>"
    plots = "".join(plot(scenarios, *each) for each in PLOTS)
    title = f"Load test: {seconds:.0f} s, up to {max(int(row['users']) for row in tokens)} users"
    return (
        f"<!doctype html><meta charset=utf-8><title>{title}</title><style>{STYLE}</style><h1>{title}</h1>{verdict}"
        f"{table(header, lines)}<p>Latencies in ms.</p>{plots}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prefix", help="what locust's --csv said")
    prefix = parser.parse_args().prefix
    page = report(read_rows(Path(f"{prefix}_tokens.csv")), read_rows(Path(f"{prefix}_stats.csv")))
    path = Path(f"{prefix}_report.html")
    path.write_text(page)
    print(path)


if __name__ == "__main__":
    main()
