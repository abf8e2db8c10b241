"""A real Prometheus scrapes real processes under load, and answers every query of the dashboard and of the alerts."""

import contextlib
import json
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from loadtest.server_process import ServerProcess, tandem_serve
from tests.chart.kube_tools import NoKubeTools, tool
from tests.chart.promql import VARIABLES, fill_in
from tests.chart.rendering import render

SIMULATED_STEP_MS = 2
# Labels that the chart's PodMonitors add.
TARGET = {"namespace": "default", "app_kubernetes_io_instance": "tandem", "container": "c", "endpoint": "e"}


@pytest.fixture(scope="module")
def binaries() -> None:
    if shutil.which("prometheus") is None:
        pytest.skip("prometheus is not installed (Debian: apt install prometheus)")
    try:
        tool("helm")
    except NoKubeTools as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="module")
def server(binaries: None, smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    flags = ("--executor", "simulated", "--engines", "2", "--simulated-step-ms", str(SIMULATED_STEP_MS))
    with tandem_serve(tmp_path_factory.mktemp("server"), *flags) as server:
        yield server


class Prometheus:
    """The server's process, and its query API."""

    def __init__(self, folder: Path, scrape: list[dict[str, Any]], groups: list[dict[str, Any]]) -> None:
        (folder / "rules.yaml").write_text(yaml.safe_dump({"groups": groups}))
        configuration = {
            "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(folder / "rules.yaml")],
            "scrape_configs": scrape,
        }
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(configuration))
        self.log = folder / "prometheus.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [
                    "prometheus",
                    f"--config.file={folder / 'prometheus.yaml'}",
                    f"--storage.tsdb.path={folder / 'data'}",
                    "--web.listen-address=127.0.0.1:0",
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self.url = ""

    def wait_until_ready(self) -> None:
        """Reads the port that it chose from its log. It answers 503, not JSON, to every query before it is ready."""

        def ready() -> bool:
            chosen = re.search(r'msg="Listening on" address=(\S+)', self.log.read_text())
            if chosen is None:
                return False
            self.url = f"http://{chosen[1]}"
            with contextlib.suppress(httpx.TransportError):
                return httpx.get(f"{self.url}/-/ready", timeout=30).is_success
            return False

        self._wait(ready, "Prometheus is ready")

    def query(self, expression: str) -> list[Any]:
        """The samples of an instant query. Fails with Prometheus' message where it refuses it."""
        response = httpx.post(f"{self.url}/api/v1/query", data={"query": expression}, timeout=30)
        assert "json" in response.headers.get("content-type", ""), f"{response.status_code}: {response.text[:500]}"
        answer = response.json()
        assert answer["status"] == "success", f"{expression}: {answer.get('error')}"
        return answer["data"]["result"]

    def wait_for(self, expression: str, what: str) -> None:
        self._wait(lambda: bool(self.query(expression)), what)

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert self.process.poll() is None, self.log.read_text()[-2000:]
            assert time.monotonic() < deadline, f"not within 60 s: {what}"
            time.sleep(0.1)


@pytest.fixture(scope="module")
def prometheus(server: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    rendered = render({"prometheusRule.enabled": True, "grafanaDashboard.enabled": True})
    targets = [("frontend", f"127.0.0.1:{server.port}", {"pod": "frontend-0"})]
    for index, engine in enumerate(server.engines):
        address = f"127.0.0.1:{engine['probe_port']}"
        targets.append(("engine", address, {"pod": f"engine-{index}", "tandem_pool": "default"}))
    scrape = [
        {
            "job_name": labels["pod"],
            "static_configs": [
                {"targets": [address], "labels": TARGET | {"app_kubernetes_io_component": component} | labels}
            ],
        }
        for component, address, labels in targets
    ]
    folder = tmp_path_factory.mktemp("prometheus")
    prometheus = Prometheus(folder, scrape, rendered.one("PrometheusRule")["spec"]["groups"])
    try:
        prometheus.wait_until_ready()
        prometheus.wait_for("count(up == 1) == 3", "everything is scraped")
        make_load(server)
        # Rates need two samples after the load began.
        prometheus.wait_for(
            'sum(increase(tandem_frontend_requests_total{status="200"}[10m])) > 0', "the load is in the samples"
        )
        yield prometheus
    finally:
        prometheus.process.terminate()
        prometheus.process.wait(30)


def make_load(server: ServerProcess) -> None:
    """Whole and streamed answers, a refused request, and a client that leaves; again and again for some scrapes."""
    until = time.monotonic() + 6
    chat = {"messages": [{"role": "user", "content": "Tell me a story. " * 10}], "max_tokens": 20}
    with httpx.Client(base_url=server.url, timeout=60) as client:
        while time.monotonic() < until:
            assert client.post("/v1/chat/completions", json=chat).status_code == 200
            assert "[DONE]" in client.post("/v1/chat/completions", json=chat | {"stream": True}).text
            assert client.post("/v1/completions", json={"prompt": "Once", "max_tokens": 8}).status_code == 200
            assert client.post("/v1/chat/completions", json={"messages": []}).status_code == 400
            with client.stream(
                "POST", "/v1/chat/completions", json=chat | {"stream": True, "max_tokens": 900}
            ) as answer:
                next(answer.iter_bytes())


def panel_queries() -> list[tuple[str, str]]:
    (content,) = render({"grafanaDashboard.enabled": True}).one("ConfigMap", "monitoring")["data"].values()
    return [
        (f"{panel['title']}, {target['refId']}", fill_in(target["expr"]))
        for panel in json.loads(content)["panels"]
        for target in panel.get("targets", [])
    ]


def test_every_panel_shows_something(prometheus: Prometheus) -> None:
    empty = [title for title, query in panel_queries() if not prometheus.query(query)]
    # No request has failed: there is no 5xx to show.
    assert set(empty) <= {"Errors and broken streams, A"}


def test_numbers_make_sense(prometheus: Prometheus) -> None:
    queries = dict(panel_queries())

    def value(title: str) -> float:
        (sample,) = prometheus.query(queries[title])
        return float(sample["value"][1])

    assert value("Engines ready, A") == 2
    assert value("Output tokens per second, A") > 0
    assert 0 < value("Time to first token, p95, A") < 60
    assert value("Errors, A") == 0
    assert 0 <= value("Fullest KV cache, A") <= 1
    assert 0 < value("Prefix cache's hits, A") <= 1
    phases = {
        sample["metric"]["phase"]: float(sample["value"][1])
        for sample in prometheus.query(queries["Where a step's time goes, A"])
    }
    assert {"schedule", "forward", "sample", "output", "send"} <= set(phases)
    assert phases["forward"] >= SIMULATED_STEP_MS / 1000


def test_alerts_are_evaluated_and_none_fires(prometheus: Prometheus) -> None:
    groups = httpx.get(f"{prometheus.url}/api/v1/rules", timeout=30).json()["data"]["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len(rules) >= 10
    assert {rule["name"]: (rule["health"], rule.get("lastError")) for rule in rules} == {
        rule["name"]: ("ok", None) for rule in rules
    }
    assert not [rule["name"] for rule in rules if rule["state"] == "firing"]


def test_variables_find_their_values(prometheus: Prometheus) -> None:
    (content,) = render({"grafanaDashboard.enabled": True}).one("ConfigMap", "monitoring")["data"].values()
    found: dict[str, list[str]] = {}
    for variable in json.loads(content)["templating"]["list"]:
        if variable["type"] != "query":
            continue
        inner, _, label = variable["query"]["query"].removeprefix("label_values(").removesuffix(")").rpartition(", ")
        found[variable["name"]] = sorted({sample["metric"][label] for sample in prometheus.query(fill_in(inner))})
    assert {f"${name}" for name in found} == set(VARIABLES) - {"$__rate_interval"}
    assert found["namespace"] == ["default"]
    assert found["release"] == ["tandem"]
    assert found["pool"] == ["default"]
    assert found["model"] == ["SmolLM2-135M-Instruct"]
