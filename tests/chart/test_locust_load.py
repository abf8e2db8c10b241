"""The load test's numbers: a real locust against a server that streams at a known pace, and the report of it."""

import csv
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.chart.rendering import ROOT

PACE = 0.02
TOKENS = 10
SCENARIOS = ["AgentUser", "BurstUser", "ChatUser", "DisconnectingUser", "LongContextUser", "SharedPrefixUser"]


class Model(BaseHTTPRequestHandler):
    """A model that says the same ten words to everybody, one every 20 ms; to the fifth client an error instead."""

    protocol_version = "HTTP/1.1"
    asked = 0
    disconnects = 0

    def do_GET(self) -> None:
        body = json.dumps({"data": [{"id": "a-model"}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert request["model"] == "a-model"
        assert request["stream"]
        type(self).asked += 1
        fails = type(self).asked == 5
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            for index in range(TOKENS):
                time.sleep(PACE)
                reason = "length" if index == TOKENS - 1 else None
                if fails and index == 3:
                    self.event({"error": {"message": "the engine is lost"}})
                    break
                self.event({"choices": [{"index": 0, "delta": {"content": "word "}, "finish_reason": reason}]})
            self.event({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": TOKENS}})
            self.chunk(b"data: [DONE]\n\n")
            self.chunk(b"")
        except OSError:
            type(self).disconnects += 1
            self.close_connection = True

    def event(self, event: object) -> None:
        self.chunk(b"data: " + json.dumps(event).encode() + b"\n\n")

    def chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Model)
    server.daemon_threads = True
    serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    serving.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    serving.join()
    server.server_close()


def test_locust_measures_tokens_and_reports(url: str, tmp_path: Path) -> None:
    prefix = tmp_path / "results/run"
    command = [
        *(sys.executable, "-m", "locust", "-f", ROOT / "loadtest/locustfile.py", "--host", url, "--headless"),
        *("--users", "12", "--spawn-rate", "12", "--run-time", "6s", "--csv", prefix, "--only-summary"),
        *("--burst-seconds", "2", "--context-words", "50", "--equal-weights"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path)
    # 1 is locust's status where a request failed, and one did.
    assert done.returncode == 1, done.stdout + done.stderr

    with Path(f"{prefix}_stats.csv").open(newline="") as file:
        stats = {(row["Type"], row["Name"]): row for row in csv.DictReader(file)}
    failures = sum(int(row["Failure Count"]) for (kind, _), row in stats.items() if kind == "POST")
    assert failures == 1
    assert "the engine is lost" in Path(f"{prefix}_failures.csv").read_text()
    assert int(stats["", "Aggregated"]["Request Count"]) == sum(
        int(row["Request Count"]) for (kind, _), row in stats.items() if kind == "POST"
    ), "the tokens' rows count as requests"
    for scenario in SCENARIOS:
        name = scenario.removesuffix("User")
        assert float(stats["TTFT", name]["Min Response Time"]) >= 1000 * PACE
        gap = float(stats["ITL", name]["Average Response Time"])
        # A first word that was read late makes the gap after it shorter.
        assert 800 * PACE <= gap < 3000 * PACE
        if name != "Disconnecting":
            assert float(stats["STREAM", name]["Average Content Size"]) == TOKENS
    assert Model.disconnects > 0

    with Path(f"{prefix}_tokens.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["scenario"] for row in rows} == {scenario.removesuffix("User") for scenario in SCENARIOS}
    last = [row for row in rows if row["scenario"] == "Agent"][-1]
    assert int(last["tokens"]) == TOKENS * int(last["streams"])

    report = subprocess.run(
        [sys.executable, "-m", "loadtest.locust_report", prefix], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert report.returncode == 0, report.stderr
    page = Path(report.stdout.strip()).read_text()
    assert page.count("<img ") == 3
    assert "1 requests failed" in page
