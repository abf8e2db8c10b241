"""Writes the chart's Grafana dashboard, charts/tandem/files/dashboard.json: `make docs`. A test holds them together.

What the panels ask is in `dashboard_panels`; here they become Grafana's JSON model.
"""

import json
import sys
from pathlib import Path
from typing import Any

from docs.dashboard_panels import ROWS, Panel

DASHBOARD = Path(__file__).parents[1] / "charts/tandem/files/dashboard.json"
WIDTH, HEIGHT, COLUMNS = 8, 8, 24


def _targets(panel: Panel) -> list[dict[str, Any]]:
    return [
        {"refId": chr(ord("A") + index), "expr": query, "legendFormat": legend or "__auto", "range": True}
        for index, (query, legend) in enumerate(panel.queries)
    ]


def _panel(panel: Panel, id_: int, x: int, y: int, width: int, height: int) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if panel.ceiling is not None:
        defaults["max"] = panel.ceiling
    if panel.kind == "stat":
        steps = [{"color": "green", "value": None}]
        if panel.warn is not None and panel.alarm is not None:
            steps += [{"color": "orange", "value": panel.warn}, {"color": "red", "value": panel.alarm}]
            if panel.falling:
                steps = [
                    {"color": "red", "value": None},
                    {"color": "orange", "value": panel.alarm},
                    {"color": "green", "value": panel.warn},
                ]
        defaults["thresholds"] = {"mode": "absolute", "steps": steps}
        options: dict[str, Any] = {
            "reduceOptions": {"calcs": ["lastNotNull"]},
            "colorMode": "value",
            "graphMode": "area",
        }
    else:
        defaults["custom"] = {"fillOpacity": 20 if panel.stacked else 5, "showPoints": "never"}
        if panel.stacked:
            defaults["custom"]["stacking"] = {"mode": "normal"}
        options = {
            "legend": {"displayMode": "list", "placement": "bottom"},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    return {
        "id": id_,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": {"type": "prometheus", "uid": "$datasource"},
        "gridPos": {"x": x, "y": y, "w": width, "h": height},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": _targets(panel),
    }


def _panels() -> list[dict[str, Any]]:
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS.items():
        header = {"type": "row", "title": title, "collapsed": False, "panels": []}
        panels.append({"id": len(panels) + 1, **header, "gridPos": {"x": 0, "y": y, "w": COLUMNS, "h": 1}})
        y += 1
        stats = row[0].kind == "stat"
        width, height = (COLUMNS // len(row), 4) if stats else (WIDTH, HEIGHT)
        for index, panel in enumerate(row):
            x = index * width % COLUMNS
            panels.append(_panel(panel, len(panels) + 1, x, y + index * width // COLUMNS * height, width, height))
        y += -(-len(row) * width // COLUMNS) * height
    return panels


def _variable(name: str, label: str, query: str) -> dict[str, Any]:
    return {
        "type": "query",
        "name": name,
        "label": label,
        "datasource": {"type": "prometheus", "uid": "$datasource"},
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
        "sort": 1,
    }


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana's JSON model."""
    of_release = 'namespace=~"$namespace", app_kubernetes_io_instance=~"$release"'
    variables = [
        {"type": "datasource", "name": "datasource", "label": "Prometheus", "query": "prometheus", "current": {}},
        _variable("namespace", "Namespace", "label_values(tandem_frontend_info, namespace)"),
        _variable(
            "release",
            "Release",
            'label_values(tandem_frontend_info{namespace=~"$namespace"}, app_kubernetes_io_instance)',
        ),
        _variable("model", "Model", f"label_values(tandem_frontend_engines_ready{{{of_release}}}, model)"),
        _variable("pool", "Pool", f"label_values(tandem_engine_info{{{of_release}}}, tandem_pool)"),
    ]
    return {
        "uid": "tandem-serving",
        "title": "Tandem",
        "description": "Language models served by Tandem: what users see, engines, the link, frontends.",
        "tags": ["tandem", "llm"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": variables},
        "panels": _panels(),
    }


def text() -> str:
    return json.dumps(dashboard(), indent=1, ensure_ascii=False) + "\n"


def main() -> int:
    DASHBOARD.write_text(text(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
