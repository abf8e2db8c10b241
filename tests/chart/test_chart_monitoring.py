"""The dashboard and the alerts ask for metrics and labels that the services have, and alerts fire when they should."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from docs.generate_dashboard import DASHBOARD, text
from services.engine.metric_catalogue import CATALOGUE as ENGINE
from services.frontend.metrics.catalogue import CATALOGUE as FRONTEND
from services.frontend.settings import FrontendSettings
from shared.metrics import Metric
from tests.chart.promql import fill_in, grouping_labels, selectors
from tests.chart.rendering import Rendered, container, environment, render

MONITORED = {"podMonitor.enabled": True, "prometheusRule.enabled": True, "grafanaDashboard.enabled": True}
METRICS = {metric.name: metric for metric in (*FRONTEND, *ENGINE)}
# Of prometheus_client.
PROCESS_METRICS = {"process_cpu_seconds_total"}


def rules(rendered: Rendered | None = None) -> list[dict[str, Any]]:
    spec = (rendered or render(MONITORED)).one("PrometheusRule")["spec"]
    return [rule for group in spec["groups"] for rule in group["rules"]]


def dashboard() -> dict[str, Any]:
    (content,) = render(MONITORED).one("ConfigMap", "monitoring")["data"].values()
    return json.loads(content)


def panels() -> list[dict[str, Any]]:
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def panel_queries() -> list[Any]:
    # Not from the rendered chart: this is asked when tests are collected, where helm may not be had.
    return [
        pytest.param(fill_in(target["expr"]), id=f"{panel['title']}, {target['refId']}")
        for panel in json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
        for target in panel.get("targets", [])
    ]


def target_labels() -> set[str]:
    """What the Prometheus operator adds to every sample of the chart's PodMonitors."""
    labels = {"namespace", "pod", "container", "endpoint", "job", "instance"}
    for monitor in render(MONITORED).of_kind("PodMonitor"):
        labels |= {re.sub(r"\W", "_", label) for label in monitor["spec"]["podTargetLabels"]}
    return labels


def labels_of(name: str) -> set[str]:
    """A sample's labels, by its metric. Fails where no metric of the services has such samples."""
    if name in PROCESS_METRICS:
        return set()
    metric: Metric | None = METRICS.get(name)
    if metric is not None and metric.kind != "histogram":
        return set(metric.labels)
    base = re.sub(r"_(bucket|sum|count)$", "", name)
    metric = METRICS.get(base)
    assert metric is not None, f"no metric has samples {name}"
    assert metric.kind == "histogram" and base != name, f"{name} is no sample of a {metric.kind}"  # noqa: PT018
    return {*metric.labels, *({"le"} if name.endswith("_bucket") else ())}


@pytest.mark.parametrize("query", panel_queries())
def test_panels_ask_for_what_the_services_expose(query: str) -> None:
    check_query(query)


def test_alerts_ask_for_what_the_services_expose() -> None:
    for rule in rules():
        check_query(rule["expr"])


def check_query(query: str) -> None:
    """Metrics, matchers and grouping are of samples that there are."""
    asked = list(selectors(query))
    assert asked
    known = target_labels()
    for name, labels in asked:
        assert name, "a selector without a metric"
        assert set(labels) <= labels_of(name) | known, f"{name} has no such label"
    assert grouping_labels(query) <= known.union(*(labels_of(name) for name, _ in asked))


def test_every_query_of_a_release_is_of_that_release() -> None:
    for rule in rules():
        for _, labels in selectors(rule["expr"]):
            assert {"namespace", "app_kubernetes_io_instance"} <= set(labels), rule["alert"]
    for panel in panels():
        for target in panel["targets"]:
            for _, labels in selectors(fill_in(target["expr"])):
                assert {"namespace", "app_kubernetes_io_instance"} <= set(labels), panel["title"]


def test_dashboard_is_the_generated_one() -> None:
    assert dashboard() == json.loads(text())
    assert DASHBOARD.read_text(encoding="utf-8") == text(), "run `make docs`"


def test_dashboard_is_whole() -> None:
    model = dashboard()
    variables = {variable["name"] for variable in model["templating"]["list"]}
    used = set(re.findall(r"\$(\w+)", json.dumps(model["panels"]))) - {"__rate_interval"}
    assert used == variables
    ids = [panel["id"] for panel in model["panels"]]
    assert len(set(ids)) == len(ids)
    titles = [panel["title"] for panel in model["panels"]]
    assert len(set(titles)) == len(titles)
    cells = set()
    for panel in model["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert (x, y) not in cells, f"{panel['title']} lies over another panel"
                cells.add((x, y))
    for panel in panels():
        assert panel["description"]
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
    for variable in model["templating"]["list"]:
        if variable["type"] == "query":
            inner, label = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"]).groups()
            ((name, labels),) = selectors(fill_in(inner))
            assert {*labels, label} <= labels_of(name) | target_labels()


def test_dashboard_is_found_by_grafanas_sidecar() -> None:
    rendered = render(MONITORED | {"grafanaDashboard.annotations": {"grafana_folder": "Inference"}})
    config_map = rendered.one("ConfigMap", "monitoring")
    assert config_map["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert config_map["metadata"]["annotations"] == {"grafana_folder": "Inference"}
    assert len(json.dumps(config_map)) < 256 * 1024, "kubectl apply keeps a copy in an annotation of at most 256 KiB"


def test_alerts_say_what_to_do() -> None:
    names = [rule["alert"] for rule in rules()]
    assert len(set(names)) == len(names)
    for rule in rules():
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert set(rule["annotations"]) == {"summary", "description", "runbook"}
        for text_ in rule["annotations"].values():
            for label in re.findall(r"\$labels\.(\w+)", text_):
                assert label in grouping_labels(rule["expr"]), f"{rule['alert']} has no label {label}"


def test_runbooks_name_settings_and_metrics_that_exist() -> None:
    source = Path("services/frontend/settings.py"), Path("services/engine/settings.py")
    settings = "".join((Path(__file__).parents[2] / path).read_text() for path in source)
    values = (Path(__file__).parents[2] / "charts/tandem/values.yaml").read_text()
    alerts = {rule["alert"] for rule in rules()}
    for rule in rules():
        runbook = rule["annotations"]["runbook"]
        for name in re.findall(r"\btandem_\w+", runbook):
            assert name in METRICS, name
        for name in re.findall(r"\bTandem[A-Z]\w+", runbook):
            assert name in alerts, name
        for name in re.findall(r"\b(?:max|kv|gpu|no|request|heartbeat)_[a-z_]+\b", runbook):
            assert name in settings or name in ("no_engine",), name
        for name in re.findall(r"\b(?:podMonitor|networkPolicy|autoscaling)\.(\w+)", runbook):
            assert f"{name}:" in values, name
        for title in re.findall(r'"([A-Z][\w ]+)"', runbook):
            assert title in [panel["title"] for panel in panels()] or title == "Rotate keys", title


def test_the_limit_in_an_alert_is_the_frontends() -> None:
    def limit(rendered: Rendered) -> str:
        (rule,) = [rule for rule in rules(rendered) if rule["alert"] == "TandemFrontendNearLimit"]
        return rule["expr"].rpartition("*")[2].strip()

    assert limit(render(MONITORED)) == str(FrontendSettings.model_fields["max_concurrent_requests"].default)
    rendered = render(MONITORED | {"frontend.settings.max_concurrent_requests": 100000})
    assert limit(rendered) == "100000"
    assert environment(container(rendered.one("Deployment")))["TANDEM_MAX_CONCURRENT_REQUESTS"] == "100000"


TARGET = 'namespace="default",app_kubernetes_io_instance="tandem"'
# For each alert: series that make it fire after an hour, and the labels it fires with.
FIRING: dict[str, tuple[dict[str, str], list[dict[str, str]]]] = {
    "TandemNoFrontendReady": ({"tandem_frontend_ready{pod='f-0'}": "0x60"}, [{}]),
    "TandemNoEngineReady": (
        {
            "tandem_frontend_engines_ready{pod='f-0',model='m'}": "0x60",
            "tandem_frontend_engines_ready{pod='f-1',model='m'}": "2x60",
            "tandem_frontend_engines_ready{pod='f-1',model='n'}": "2x60",
        },
        [{"model": "m"}],
    ),
    "TandemEngineNotReady": ({"tandem_engine_ready{pod='e-0'}": "0x60"}, [{"pod": "e-0"}]),
    "TandemQueueGrows": (
        {
            "tandem_engine_requests_waiting{pod='e-0',tandem_pool='p'}": "0+1x60",
            "tandem_engine_requests_waiting{pod='e-1',tandem_pool='p'}": "0+1x60",
        },
        [{"tandem_pool": "p"}],
    ),
    "TandemHighErrorRatio": (
        {
            "tandem_frontend_requests_total{pod='f-0',route='/v1/chat/completions',status='200'}": "0+90x60",
            # No stream has ever failed: there is no such series yet.
            "tandem_frontend_requests_total{pod='f-0',route='/v1/chat/completions',status='503'}": "0+10x60",
        },
        [{}],
    ),
    "TandemKVCacheFull": (
        {
            "tandem_engine_kv_usage_ratio{pod='e-0',tandem_pool='p'}": "0.99x60",
            "tandem_engine_preemptions_total{pod='e-0',tandem_pool='p'}": "0+1x60",
        },
        [{"tandem_pool": "p"}],
    ),
    "TandemFailovers": (
        {"tandem_frontend_failovers_total{pod='f-0',model='m',reason='silent'}": "0x55 3x5"},
        [{"model": "m"}],
    ),
    "TandemRequestsGivenUp": ({"tandem_frontend_given_up_total{pod='f-0',model='m'}": "0x55 3x5"}, [{"model": "m"}]),
    "TandemEventLoopLag": (
        {
            "tandem_frontend_event_loop_lag_seconds_bucket{pod='f-0',le='0.25'}": "0+90x60",
            "tandem_frontend_event_loop_lag_seconds_bucket{pod='f-0',le='0.5'}": "0+100x60",
            "tandem_frontend_event_loop_lag_seconds_bucket{pod='f-0',le='+Inf'}": "0+100x60",
        },
        [{"pod": "f-0"}],
    ),
    "TandemFrontendNearLimit": (
        {
            "tandem_frontend_requests_in_flight{pod='f-0'}": "7000x60",
            "tandem_frontend_workers{pod='f-0'}": "2x60",
            "tandem_frontend_requests_in_flight{pod='f-1'}": "7000x60",
            "tandem_frontend_workers{pod='f-1'}": "4x60",
        },
        [{"pod": "f-0"}],
    ),
    "TandemLinkRefused": (
        {
            "tandem_engine_handshake_failures_total{pod='e-0',reason='unknown_key'}": "0+1x60",
            "tandem_engine_handshake_failures_total{pod='e-0',reason='unfinished'}": "0+9x60",
        },
        [{"reason": "unknown_key"}],
    ),
}
# What all of them see when all is well: no alert may fire on it.
WELL = {
    "tandem_frontend_ready{pod='f-0'}": "1x60",
    "tandem_frontend_engines_ready{pod='f-0',model='m'}": "2x60",
    "tandem_engine_ready{pod='e-0'}": "1x60",
    "tandem_engine_requests_waiting{pod='e-0',tandem_pool='p'}": "0x60",
    # A full cache without preemptions is a busy engine; a few errors are within bounds.
    "tandem_engine_kv_usage_ratio{pod='e-0',tandem_pool='p'}": "0.99x60",
    "tandem_engine_preemptions_total{pod='e-0',tandem_pool='p'}": "4x60",
    "tandem_frontend_requests_total{pod='f-0',route='/v1/chat/completions',status='200'}": "0+990x60",
    "tandem_frontend_requests_total{pod='f-0',route='/v1/chat/completions',status='503'}": "0+10x60",
    "tandem_frontend_requests_total{pod='f-0',route='/v1/chat/completions',status='400'}": "0+500x60",
    "tandem_frontend_stream_errors_total{pod='f-0',reason='failed'}": "0x60",
    "tandem_frontend_failovers_total{pod='f-0',model='m',reason='silent'}": "7x60",
    "tandem_frontend_given_up_total{pod='f-0',model='m'}": "7x60",
    "tandem_frontend_event_loop_lag_seconds_bucket{pod='f-0',le='0.25'}": "0+100x60",
    "tandem_frontend_event_loop_lag_seconds_bucket{pod='f-0',le='+Inf'}": "0+100x60",
    "tandem_frontend_requests_in_flight{pod='f-0'}": "3000x60",
    "tandem_frontend_workers{pod='f-0'}": "1x60",
    "tandem_engine_handshake_failures_total{pod='e-0',reason='unfinished'}": "0+9x60",
    "tandem_engine_handshake_failures_total{pod='e-0',reason='unknown_key'}": "2x60",
}


def promtool(*arguments: str) -> subprocess.CompletedProcess[str]:
    found = shutil.which("promtool")
    if found is None:
        pytest.skip("promtool is not installed (Debian: apt install prometheus)")
    return subprocess.run([found, *arguments], capture_output=True, text=True, check=False, timeout=120)


def unit_test(series: dict[str, str], alerts: list[dict[str, Any]]) -> dict[str, Any]:
    def with_target(name: str) -> str:
        return name.replace("{", "{" + TARGET + ",", 1)

    return {
        "interval": "1m",
        "input_series": [{"series": with_target(name), "values": values} for name, values in series.items()],
        "alert_rule_test": alerts,
    }


def test_rules_are_valid(tmp_path: Path) -> None:
    path = tmp_path / "rules.yaml"
    path.write_text(yaml.safe_dump(render(MONITORED).one("PrometheusRule")["spec"]))
    checked = promtool("check", "rules", str(path))
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_alerts_fire_when_they_should_and_only_then(tmp_path: Path) -> None:
    # Without annotations, which promtool would compare word by word.
    without = [{key: value for key, value in rule.items() if key != "annotations"} for rule in rules()]
    rule_file = tmp_path / "rules.yaml"
    rule_file.write_text(yaml.safe_dump({"groups": [{"name": "tandem", "rules": without}]}))
    by_name = {rule["alert"]: rule for rule in rules()}
    assert set(by_name) == set(FIRING), "each alert has its case"
    silent = [{"eval_time": "1h", "alertname": name, "exp_alerts": []} for name in by_name]
    tests = [unit_test(WELL, silent)]
    for name, (series, firing) in FIRING.items():
        expected = [{"exp_labels": labels | by_name[name]["labels"]} for labels in firing]
        tests.append(unit_test(series, [{"eval_time": "1h", "alertname": name, "exp_alerts": expected}]))
    path = tmp_path / "tests.yaml"
    path.write_text(yaml.safe_dump({"rule_files": [str(rule_file)], "evaluation_interval": "1m", "tests": tests}))
    done = promtool("test", "rules", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
