"""values.schema.json refuses what is wrong, in words that say what; and knows what the services know."""

import json
from typing import Any

import pytest
import yaml

from tests.chart import settings_schema, values_table
from tests.chart.rendering import CHART, RenderingFailed, render

# Dotted path, value, and what the message must name.
REFUSED: list[tuple[str, Any, str]] = [
    ("engnie", {}, "engnie"),
    ("engine.setings", {}, "setings"),
    ("engine.settings.max_model_length", 1, "max_model_length"),
    ("engine.settings.max_num_seqs", 0, "/engine/settings/max_num_seqs"),
    ("engine.settings.max_num_seqs", "many", "/engine/settings/max_num_seqs"),
    ("engine.settings.dtype", "int8", "'bfloat16'"),
    ("engine.settings.link_port", 1, "link_port"),
    ("engine.gpus", 8, "/engine/gpus"),
    ("engine.replicas", -1, "/engine/replicas"),
    ("engine.image.digest", "latest", "/engine/image/digest"),
    ("engine.modelCache.type", "pvc", "'claimPerEngine'"),
    ("engine.probes.startup.path", "/", "path"),
    ("engine.autoscaling.kind", "vpa", "'keda'"),
    ("frontend.settings.port", 1, "port"),
    ("frontend.settings.routing", "random", "/frontend/settings/routing"),
    ("frontend.replica", 1, "replica"),
    ("frontend.service.port", 70000, "/frontend/service/port"),
    ("pools", {"Upper": {}}, "Upper"),
    ("pools", {"a-pool-name-that-is-long": {}}, "a-pool-name-that-is-long"),
    ("pools", {"a": {"modle": "x"}}, "modle"),
    ("pools", {"a": {"serviceAccount": {}}}, "serviceAccount"),
    ("prometheusRule.thresholds.errorRatio", 5, "/prometheusRule/thresholds/errorRatio"),
    ("linkEncryption.existingSecrets", "x", "existingSecrets"),
    ("apiKeys.keys", ["with space"], "/apiKeys/keys/0"),
    ("ingress.paths", ["v1"], "/ingress/paths/0"),
    ("httpRoute.timeout", "never", "/httpRoute/timeout"),
]
# Values that only the templates can judge.
SENSELESS: list[tuple[dict[str, Any], str]] = [
    ({"engine.model": ""}, "pools.default: no model"),
    ({"engine.modelCache.type": "existingClaim"}, "modelCache.claimName"),
    ({"engine.modelCache.type": "hostPath"}, "modelCache.hostPath"),
    ({"engine.modelCache.type": "image"}, "modelCache.image.reference"),
    ({"engine.download.enabled": True, "engine.modelCache.readOnly": True}, "read-only"),
    ({"engine.model": "/models/m"}, "frontends cannot see"),
    ({"pools": {"a": {"model": "m"}, "b": {"model": "m"}}}, "pools a and b both serve"),
    ({"pools": {"a": {"model": "m", "servedModelName": ["x"]}, "b": {"servedModelName": ["y", "x"]}}}, '"x"'),
    ({"engine.autoscaling": {"enabled": True, "minReplicas": 9, "maxReplicas": 2}}, "maxReplicas (2)"),
    ({"frontend.autoscaling": {"enabled": True, "minReplicas": 9, "maxReplicas": 2}}, "maxReplicas (2)"),
    ({"engine.autoscaling": {"enabled": True, "kind": "keda"}}, "prometheusAddress"),
    ({"httpRoute.enabled": True}, "httpRoute.parentRefs"),
    (
        {
            "engine.modelCache.type": "existingClaim",
            "pools": {
                "a": {"model": "/models/a", "modelCache": {"claimName": "a"}},
                "b": {"model": "/models/b", "modelCache": {"claimName": "b"}},
            },
        },
        "mountPath",
    ),
]


@pytest.mark.parametrize(("path", "value", "named"), REFUSED, ids=lambda part: str(part)[:40])
def test_schema_refuses(path: str, value: Any, named: str) -> None:
    with pytest.raises(RenderingFailed) as refusal:
        render({path: value})
    assert "schema" in str(refusal.value)
    assert named in str(refusal.value)


@pytest.mark.parametrize(("values", "named"), SENSELESS, ids=lambda part: str(part)[:40])
def test_templates_refuse(values: dict[str, Any], named: str) -> None:
    with pytest.raises(RenderingFailed) as refusal:
        render(values)
    assert named in str(refusal.value)


def test_schema_knows_the_services_settings() -> None:
    schema = json.loads(settings_schema.SCHEMA.read_text())
    assert settings_schema.with_settings(schema) == schema, "out of date: make chart-docs"


def test_schema_knows_every_default_value() -> None:
    """Each value in values.yaml is described in the schema by name, so that none escapes its check."""
    schema = json.loads(settings_schema.SCHEMA.read_text())

    def resolve(node: dict[str, Any]) -> dict[str, Any]:
        while "$ref" in node:
            node = schema["definitions"][node["$ref"].rpartition("/")[2]]
        return node

    def check(values: dict[str, Any], node: dict[str, Any], path: str) -> None:
        node = resolve(node)
        if "properties" not in node:
            return
        for name, value in values.items():
            assert name in node["properties"], f"{path}{name}"
            if isinstance(value, dict):
                check(value, node["properties"][name], f"{path}{name}.")
        # And none is in the schema alone, but settings, which have no values here.
        if not path.endswith("settings.") and node.get("additionalProperties") is False and "." not in path[:-1]:
            assert set(node["properties"]) == set(values), path

    check(yaml.safe_load((CHART / "values.yaml").read_text()), schema, "")


def test_readme_lists_every_value() -> None:
    readme = values_table.README.read_text()
    assert values_table.with_table(readme) == readme, "out of date: make chart-docs"
