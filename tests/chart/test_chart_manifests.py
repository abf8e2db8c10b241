"""Every example and a matrix of options render, lint, and give manifests that Kubernetes' own schemas accept."""

import json
from typing import Any

import pytest
import yaml
from kubernetes_validate import SchemaNotFoundError, ValidationError, validate

from tests.chart.rendering import (
    CHART,
    EXAMPLES,
    NEWEST_KUBERNETES,
    OLDEST_KUBERNETES,
    Rendered,
    container,
    environment,
    helm,
    render,
    value_arguments,
)

TWO_POOLS = {"a": {"model": "org/a"}, "b": {"model": "org/b", "gpus": 0}}
# By name: what each sets beside the defaults.
OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "two pools": {"pools": TWO_POOLS},
    "keys generated": {"apiKeys.enabled": True},
    "keys given": {"apiKeys": {"enabled": True, "keys": ["one", "two"]}},
    "keys of mine": {"apiKeys": {"enabled": True, "existingSecret": "mine", "key": "api.keys"}},
    "link keys generated": {"linkEncryption.enabled": True, "pools": TWO_POOLS},
    "link keys of mine": {"linkEncryption": {"enabled": True, "existingSecret": "mine"}},
    "discovery: kubernetes": {"frontend.discovery": "kubernetes", "pools": TWO_POOLS},
    "hub token": {"huggingFace": {"token": "hf_x", "endpoint": "https://hub.example.com"}},
    "hub token of mine": {"huggingFace.existingSecret": "mine"},
    "cache: claim per engine": {"engine.modelCache": {"type": "claimPerEngine", "storageClassName": "fast"}},
    "cache: shared claim": {"engine.modelCache": {"type": "sharedClaim", "size": "1Ti"}},
    "cache: existing claim": {"engine.modelCache": {"type": "existingClaim", "claimName": "c", "readOnly": True}},
    "cache: path": {"engine.model": "/models/m", "engine.modelCache": {"type": "hostPath", "hostPath": "/srv/m"}},
    "cache: empty, limited": {"engine.modelCache.size": "5Gi"},
    "download": {"engine.download.enabled": True, "engine.revision": "main"},
    "chat templates": {"pools": {"a": {"model": "org/a", "chatTemplate": "{% for m in messages %}{% endfor %}"}}},
    "hpa": {"frontend.autoscaling.enabled": True, "engine.autoscaling.enabled": True},
    "keda": {
        "engine.autoscaling": {"enabled": True, "kind": "keda", "prometheusAddress": "http://p:9090"},
    },
    "ingress": {"ingress": {"enabled": True, "hosts": ["a.example.com"], "tls": [{"hosts": ["a.example.com"]}]}},
    "ingress, another controller": {"ingress": {"enabled": True, "controller": "none", "className": "x"}},
    "http route": {"httpRoute": {"enabled": True, "parentRefs": [{"name": "g"}], "hostnames": ["a.example.com"]}},
    "pod monitor": {"podMonitor": {"enabled": True, "labels": {"release": "prometheus"}}},
    "alerts": {"prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}}},
    "dashboard": {"grafanaDashboard.enabled": True},
    "traces": {"tracing": {"endpoint": "http://collector:4317", "ratio": 0.1, "headersSecret": {"name": "headers"}}},
    "no policies": {"networkPolicy.enabled": False, "frontend.podDisruptionBudget.enabled": False},
    "closed policies": {"networkPolicy.clients": [{"podSelector": {}}], "networkPolicy.prometheus": []},
    "pre-stop": {"frontend.drain.preStopSeconds": 5, "engine.drain.preStopSeconds": 5},
    "registry": {"global": {"imageRegistry": "r.example.com", "imagePullSecrets": [{"name": "r"}]}},
    "load balancer": {"frontend.service": {"type": "LoadBalancer", "externalTrafficPolicy": "Local"}},
    "ipv6": {"bindAddress": "::"},
    "accounts of mine": {
        "frontend.serviceAccount": {"create": False, "name": "f"},
        "engine.serviceAccount": {"create": False},
    },
    "extras": {
        f"{component}.{name}": value
        for component in ("frontend", "engine")
        for name, value in {
            "extraArgs": ["--log-level=debug"],
            "extraEnv": [{"name": "A", "value": "b"}],
            "extraEnvFrom": [{"configMapRef": {"name": "c"}}],
            "extraVolumes": [{"name": "v", "emptyDir": {}}],
            "extraVolumeMounts": [{"name": "v", "mountPath": "/v"}],
            "extraContainers": [{"name": "side", "image": "side:1"}],
            "initContainers": [{"name": "init", "image": "init:1"}],
            "podLabels": {"l": "v"},
            "podAnnotations": {"a": "v"},
            "nodeSelector": {"n": "v"},
            "tolerations": [{"key": "k", "operator": "Exists"}],
            "affinity": {"podAntiAffinity": {}},
            "priorityClassName": "p",
            "runtimeClassName": "r",
        }.items()
    }
    | {"commonLabels": {"team": "t"}, "extraObjects": [{"kind": "ConfigMap", "apiVersion": "v1", "metadata": {}}]},
}
IMAGE_VOLUME = {
    "engine.model": "/models/m",
    "engine.modelCache": {"type": "image", "image": {"reference": "registry.example.com/m:1"}},
}


def assert_valid(rendered: Rendered, kubernetes: str) -> None:
    for manifest in rendered.manifests:
        try:
            validate(manifest, kubernetes, strict=True)
        except SchemaNotFoundError:
            # A custom resource, whose schema Kubernetes itself does not have; tests of their own look at these.
            assert manifest["kind"] in ("PodMonitor", "PrometheusRule", "ScaledObject", "HTTPRoute"), manifest["kind"]
        except ValidationError as error:
            pytest.fail(f"{manifest['kind']} {manifest['metadata']['name']}, Kubernetes {kubernetes}: {error}")


@pytest.mark.parametrize("kubernetes", [OLDEST_KUBERNETES, NEWEST_KUBERNETES])
@pytest.mark.parametrize("option", OPTIONS)
def test_options_give_valid_manifests(option: str, kubernetes: str) -> None:
    assert_valid(render(OPTIONS[option], kubernetes=kubernetes), kubernetes)


@pytest.mark.parametrize("kubernetes", [OLDEST_KUBERNETES, NEWEST_KUBERNETES])
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_examples_give_valid_manifests(example: Any, kubernetes: str) -> None:
    assert_valid(render(None, example, kubernetes=kubernetes), kubernetes)


def test_image_volume_is_valid_where_kubernetes_has_it() -> None:
    rendered = render(IMAGE_VOLUME)
    assert_valid(rendered, NEWEST_KUBERNETES)
    for owner in rendered.pod_owners():
        volumes = owner["spec"]["template"]["spec"]["volumes"]
        assert {"reference": "registry.example.com/m:1", "pullPolicy": "IfNotPresent"} in [
            v.get("image") for v in volumes
        ]
    assert environment(container(rendered.one("StatefulSet")))["HF_HUB_OFFLINE"] == "1"


def test_too_old_a_kubernetes_is_refused() -> None:
    done = helm("template", "t", str(CHART), "--kube-version", "1.29.0")
    assert done.returncode
    assert "kubeVersion" in done.stderr


@pytest.mark.parametrize("example", [None, *EXAMPLES], ids=lambda path: path.stem if path else "defaults")
def test_lint_finds_nothing(example: Any) -> None:
    done = helm("lint", str(CHART), "--strict", *value_arguments(None, (example,) if example else ()))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("option", OPTIONS)
def test_every_manifest_is_labelled_and_named_once(option: str) -> None:
    seen = set()
    for manifest in render(OPTIONS[option]).manifests:
        if not manifest["metadata"]:
            continue
        labels = manifest["metadata"]["labels"]
        assert labels["app.kubernetes.io/instance"] == "tandem"
        assert labels["app.kubernetes.io/managed-by"] == "Helm"
        assert all(isinstance(value, str) for value in labels.values())
        name = (manifest["kind"], manifest["metadata"]["name"])
        assert name not in seen
        seen.add(name)


def test_a_pool_may_override_with_nothing_false_or_zero() -> None:
    values: dict[str, Any] = {
        "engine": {"gpus": 1, "settings": {"max_num_seqs": 8}, "podDisruptionBudget": {"enabled": True}},
        "pools": {
            "a": {"model": "org/a", "gpus": 0, "replicas": 0, "podDisruptionBudget": {"enabled": False}},
            "b": {"model": "org/b", "settings": {"max_num_seqs": 9}},
        },
    }
    rendered = render(values)
    first, second = rendered.of_kind("StatefulSet")
    assert first["spec"]["replicas"] == 0
    assert "nvidia.com/gpu" not in json.dumps(first)
    assert second["spec"]["replicas"] == 1
    assert container(second)["resources"]["limits"] == {"nvidia.com/gpu": 1}
    assert environment(container(first))["TANDEM_MAX_NUM_SEQS"] == "8"
    assert environment(container(second))["TANDEM_MAX_NUM_SEQS"] == "9"
    assert [budget["metadata"]["labels"].get("tandem/pool") for budget in rendered.of_kind("PodDisruptionBudget")] == [
        "b",
        None,
    ]


@pytest.mark.parametrize("option", ["defaults", "keys generated", "two pools", "ingress", "http route"])
def test_notes_tell_what_to_do_next(option: str) -> None:
    done = helm("install", "tandem", str(CHART), "--dry-run=client", *value_arguments(OPTIONS[option], ()))
    assert done.returncode == 0, done.stderr
    notes = done.stdout.partition("\nNOTES:\n")[2]
    assert "helm -n default test tandem" in notes
    assert "/v1/chat/completions" in notes
    assert "<no value>" not in done.stdout
    assert ("Authorization" in notes) == (option == "keys generated")


def test_extra_objects_are_rendered_as_templates() -> None:
    text = "apiVersion: v1\nkind: ConfigMap\nmetadata:\n  name: '{{ .Release.Name }}-more'\n"
    rendered = render({"extraObjects": [text, yaml.safe_load(text.replace("more", "other"))]})
    assert [manifest["metadata"]["name"] for manifest in rendered.of_kind("ConfigMap")] == [
        "tandem-more",
        "tandem-other",
    ]
