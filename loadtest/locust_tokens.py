"""Numbers that locust does not have: time to first token, inter-token latency, tokens/s.

They are rows of locust's own statistics (so they are in its tables, its CSV, its summary, and add up over workers), but
not of its totals, which count requests. A tab of its page and a CSV over time show them together.

Rows by method: TTFT and ITL in milliseconds; STREAM, whose time is a stream's mean ms per token after the first and
whose size is its tokens.
"""

import csv
import logging
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TextIO

import gevent
import requests
from locust.env import Environment
from locust.event import Events
from locust.runners import WorkerRunner
from locust.stats import RequestStats, StatsEntry

logger = logging.getLogger(__name__)

TAB = "tokens"
INTERVAL = 1.0


@dataclass(frozen=True)
class TokenRow:
    """One scenario at one moment: percentiles since the start, rates and means since the row before."""

    timestamp: float
    users: int
    scenario: str
    streams: int
    tokens: int
    tokens_per_second: float
    ttft_mean_ms: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    itl_mean_ms: float
    itl_p50_ms: float
    itl_p99_ms: float


def record_ttft(stats: RequestStats, scenario: str, milliseconds: float) -> None:
    # locust takes fractions too, and rounds only for its percentiles.
    stats.get(scenario, "TTFT").log(milliseconds, 0)  # pyright: ignore[reportArgumentType]


def record_gap(stats: RequestStats, scenario: str, milliseconds: float) -> None:
    stats.get(scenario, "ITL").log(milliseconds, 0)  # pyright: ignore[reportArgumentType]


def record_stream(stats: RequestStats, scenario: str, tokens: int, seconds: float) -> None:
    """`seconds` from the first token to the last."""
    stats.get(scenario, "STREAM").log(1000 * seconds / max(tokens - 1, 1), tokens)  # pyright: ignore[reportArgumentType]


class TokenSeries:
    """Rows over time, one a scenario and interval, from the growth of locust's entries."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._last: dict[tuple[str, str], tuple[int, float, int]] = {}
        self._last_time = time.time()
        self.latest: list[TokenRow] = []

    def sample(self) -> list[TokenRow]:
        now = time.time()
        elapsed = max(now - self._last_time, 1e-6)
        self._last_time = now
        self.latest = list(self._rows(now, elapsed))
        return self.latest

    def _rows(self, now: float, elapsed: float) -> Iterator[TokenRow]:
        stats = self._environment.stats
        runner = self._environment.runner
        for name in sorted({name for name, method in stats.entries if method == "TTFT"}):
            ttft, itl, stream = (stats.get(name, method) for method in ("TTFT", "ITL", "STREAM"))
            _, tokens = self._growth(stream)
            yield TokenRow(
                timestamp=round(now, 3),
                users=runner.user_count if runner else 0,
                scenario=name,
                streams=stream.num_requests,
                tokens=stream.total_content_length,
                tokens_per_second=round(tokens / elapsed, 2),
                ttft_mean_ms=round(self._growth(ttft)[0], 2),
                ttft_p50_ms=ttft.get_response_time_percentile(0.5) or 0,
                ttft_p99_ms=ttft.get_response_time_percentile(0.99) or 0,
                itl_mean_ms=round(self._growth(itl)[0], 2),
                itl_p50_ms=itl.get_response_time_percentile(0.5) or 0,
                itl_p99_ms=itl.get_response_time_percentile(0.99) or 0,
            )

    def _growth(self, entry: StatsEntry) -> tuple[float, int]:
        """Mean time and sum of sizes of what was logged since the last call."""
        key = (entry.name, str(entry.method))
        count, total, size = self._last.get(key, (0, 0.0, 0))
        if entry.num_requests < count:
            count, total, size = 0, 0.0, 0  # the statistics were reset
        self._last[key] = (entry.num_requests, entry.total_response_time, entry.total_content_length)
        new = entry.num_requests - count
        return ((entry.total_response_time - total) / new if new else 0.0, entry.total_content_length - size)


def install(events: Events) -> None:
    """Hook everything into a locust run."""

    @events.init.add_listener
    def on_init(environment: Environment, **_: Any) -> None:
        if isinstance(environment.runner, WorkerRunner):
            return
        series = TokenSeries(environment)
        prefix = environment.parsed_options.csv_prefix if environment.parsed_options else None
        gevent.spawn(_sample_forever, series, Path(f"{prefix}_tokens.csv") if prefix else None)
        if environment.web_ui:
            _extend_page(environment, series)

    @events.test_start.add_listener
    def on_test_start(environment: Environment, **_: Any) -> None:
        assert environment.parsed_options is not None
        environment.parsed_options.model = _model(environment)


def _model(environment: Environment) -> str:
    """The model that --model names, or the first that the server lists."""
    options = environment.parsed_options
    assert options is not None
    if options.model:
        return options.model
    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    answer = requests.get(f"{(environment.host or '').rstrip('/')}/v1/models", headers=headers, timeout=30)
    if answer.status_code != 200:
        raise RuntimeError(
            f"{answer.url} answered {answer.status_code}: {answer.text[:200]} (--model skips the question)"
        )
    return answer.json()["data"][0]["id"]


def _sample_forever(series: TokenSeries, path: Path | None) -> None:
    file: TextIO | None = None
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w", newline="")
        writer = csv.DictWriter(file, [field.name for field in fields(TokenRow)])
        writer.writeheader()
    while True:
        gevent.sleep(INTERVAL)
        rows = series.sample()
        if file is not None:
            writer.writerows(asdict(row) for row in rows)
            file.flush()


def _extend_page(environment: Environment, series: TokenSeries) -> None:
    """A tab with the latest row of every scenario, and its CSV, on locust's page."""
    from flask import Response, request

    web_ui = environment.web_ui
    assert web_ui is not None
    app = web_ui.app
    assert app is not None
    columns = [field.name for field in fields(TokenRow)][2:]

    @app.after_request
    def add_rows(response: Response) -> Response:
        if request.path == "/stats/requests" and response.is_json and isinstance(response.json, dict):
            rows = [asdict(row) for row in series.latest]
            extended = [*response.json.get("extended_stats", []), {"key": TAB, "data": rows}]
            response.set_data(app.json.dumps({**response.json, "extended_stats": extended}))
        return response

    @app.route("/tokens/csv")
    def tokens_csv() -> Response:
        lines = [",".join(columns)]
        lines += [",".join(str(asdict(row)[column]) for column in columns) for row in series.latest]
        return Response("\n".join(lines) + "\n", mimetype="text/csv")

    structure = [{"key": column, "title": column.replace("_", " ")} for column in columns]
    web_ui.template_args |= {
        "extended_tabs": [{"title": "Tokens", "key": TAB}],
        "extended_tables": [{"key": TAB, "structure": structure}],
        "extended_csv_files": [{"href": "/tokens/csv", "title": "Download tokens CSV"}],
    }
