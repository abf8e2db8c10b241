"""What the chart says agrees with what the services read: settings, ports, probes, names, drain."""

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest

from services.engine.settings import EngineSettings
from services.frontend.settings import FrontendSettings, ServedModel
from tests.chart.rendering import EXAMPLES, ROOT, Manifest, Rendered, container, environment, render
from tests.chart.test_chart_manifests import OPTIONS

SETTINGS = {"frontend": FrontendSettings, "engine": EngineSettings}
EVERYTHING = [*OPTIONS.items(), *((path.stem, path) for path in EXAMPLES)]


@pytest.fixture(params=EVERYTHING, ids=lambda named: named[0])
def rendered(request: pytest.FixtureRequest) -> Rendered:
    _, values = request.param
    return render(values) if isinstance(values, dict) else render(None, values)


def services_of(rendered: Rendered) -> Iterator[tuple[str, Manifest, Manifest]]:
    """(component, pod owner, its container)."""
    for owner in rendered.pod_owners():
        yield owner["metadata"]["labels"]["app.kubernetes.io/component"], owner, container(owner)


def test_every_variable_is_a_setting(rendered: Rendered) -> None:
    for component, _, service in services_of(rendered):
        names = [variable["name"] for variable in service["env"]]
        assert len(names) == len(set(names)), f"{component} sets a variable twice"
        for name in names:
            if name.startswith("TANDEM_"):
                assert name.removeprefix("TANDEM_").lower() in SETTINGS[component].model_fields


def test_services_accept_their_environment(rendered: Rendered, monkeypatch: pytest.MonkeyPatch) -> None:
    for component, owner, service in services_of(rendered):
        with monkeypatch.context() as patched:
            for name, value in environment(service).items():
                patched.setenv(name, value)
            settings: Any = SETTINGS[component]()
        ports = {port["name"]: port["containerPort"] for port in service["ports"]}
        if component == "frontend":
            assert settings.host == "0.0.0.0" or settings.host == "::"
            assert ports == {"http": settings.port}
            assert settings.models
        else:
            assert ports == {"link": settings.link_port, "probes": settings.probe_port}
            assert settings.link_host == settings.probe_host != "127.0.0.1"
            assert settings.model
            gpu = "nvidia.com/gpu" in service.get("resources", {}).get("limits", {})
            assert settings.device == ("cuda" if gpu else "cpu"), owner["metadata"]["name"]


def test_ports_are_the_services_defaults() -> None:
    rendered = render()
    defaults = {name: field.default for name, field in EngineSettings.model_fields.items()}
    ports = {port["name"]: port["containerPort"] for port in container(rendered.one("StatefulSet"))["ports"]}
    assert ports == {"link": defaults["link_port"], "probes": defaults["probe_port"]}
    (port,) = container(rendered.one("Deployment"))["ports"]
    assert port["containerPort"] == FrontendSettings.model_fields["port"].default


def test_commands_are_the_ones_tandem_has(rendered: Rendered) -> None:
    for component, _, service in services_of(rendered):
        assert service["args"][0] == component
        assert "command" not in service, "the image's entry point is the init process and tandem"


def test_models_name_the_headless_services(rendered: Rendered) -> None:
    services = {service["metadata"]["name"]: service for service in rendered.of_kind("Service", "engine")}
    models = json.loads(environment(container(rendered.one("Deployment")))["TANDEM_MODELS"])
    addressed = []
    for model in models:
        assert set(model) <= set(ServedModel.model_fields)
        ServedModel.model_validate(model)
        if model["discovery"] == "kubernetes":
            host = model["engine_service"]
            (link,) = services[host]["spec"]["ports"]
            assert link["name"] == ServedModel.model_validate(model).engine_port_name
        else:
            (address,) = model["engine_addresses"]
            host, _, port = address.rpartition(":")
            (link,) = services[host]["spec"]["ports"]
            assert (link["name"], str(link["port"])) == ("link", port)
        assert services[host]["spec"]["clusterIP"] == "None"
        assert services[host]["spec"]["publishNotReadyAddresses"] is True
        addressed.append(host)
    assert sorted(addressed) == sorted(services)
    for stateful_set in rendered.of_kind("StatefulSet"):
        assert stateful_set["spec"]["serviceName"] == stateful_set["metadata"]["name"] in services


def test_selectors_match_their_pods_and_no_others(rendered: Rendered) -> None:
    pods = {
        owner["metadata"]["name"]: owner["spec"]["template"]["metadata"]["labels"] for owner in rendered.pod_owners()
    }
    pods["test"] = rendered.one("Pod")["metadata"]["labels"]

    def selected(selector: dict[str, str]) -> list[str]:
        return [name for name, labels in pods.items() if selector.items() <= labels.items()]

    for owner in rendered.pod_owners():
        selector = owner["spec"]["selector"]["matchLabels"]
        assert selected(selector) == [owner["metadata"]["name"]]
        for constraint in owner["spec"]["template"]["spec"].get("topologySpreadConstraints", []):
            assert selected(constraint["labelSelector"]["matchLabels"]) == [owner["metadata"]["name"]]
        # A selector cannot be changed after the first install: nothing in it may come from a version.
        assert not {"helm.sh/chart", "app.kubernetes.io/version"} & set(pods[owner["metadata"]["name"]])
    for service in rendered.of_kind("Service"):
        name = service["metadata"]["name"]
        assert selected(service["spec"]["selector"]) == [name]
        for port in service["spec"]["ports"]:
            (owner,) = [owner for owner in rendered.pod_owners() if owner["metadata"]["name"] == name]
            assert port["targetPort"] in [port["name"] for port in container(owner)["ports"]]
    for budget in rendered.of_kind("PodDisruptionBudget"):
        assert selected(budget["spec"]["selector"]["matchLabels"]) == [budget["metadata"]["name"]]
    for policy in rendered.of_kind("NetworkPolicy"):
        component = policy["metadata"]["labels"]["app.kubernetes.io/component"]
        expected = [owner["metadata"]["name"] for name, owner, _ in services_of(rendered) if name == component]
        assert selected(policy["spec"]["podSelector"]["matchLabels"]) == expected
    for scaler in [*rendered.of_kind("HorizontalPodAutoscaler"), *rendered.of_kind("ScaledObject")]:
        target = scaler["spec"]["scaleTargetRef"]
        (owner,) = [o for o in rendered.pod_owners() if o["metadata"]["name"] == target["name"]]
        assert owner["kind"] == target["kind"]


def test_probes_mean_what_they_say(rendered: Rendered) -> None:
    for component, _, service in services_of(rendered):
        paths = {name: service[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "readiness", "liveness")}
        ports = {service[f"{name}Probe"]["httpGet"]["port"] for name in paths}
        assert ports == ({"http"} if component == "frontend" else {"probes"})
        # An engine has started when its model is loaded; a frontend's readiness waits for that, its start must not.
        started = "/health/live" if component == "frontend" else "/health/ready"
        assert paths == {"startup": started, "readiness": "/health/ready", "liveness": "/health/live"}
        if component == "engine":
            startup = service["startupProbe"]
            assert startup["periodSeconds"] * startup["failureThreshold"] >= 600


def test_metrics_to_scale_by_are_in_the_code() -> None:
    values = {"frontend.autoscaling": {"enabled": True, "targetStreams": 200}, "engine.autoscaling.enabled": True}
    for scaler in render(values).of_kind("HorizontalPodAutoscaler"):
        component = scaler["metadata"]["labels"]["app.kubernetes.io/component"]
        source = _source(component)
        (name,) = [m["pods"]["metric"]["name"] for m in scaler["spec"]["metrics"] if m["type"] == "Pods"]
        prefix = f"tandem_{component}_"
        assert name.startswith(prefix)
        assert name.removeprefix(prefix) in source


def _source(component: str) -> str:
    return "".join(path.read_text() for path in (ROOT / "services" / component).rglob("*.py"))


@pytest.mark.parametrize("component", ["frontend", "engine"])
def test_probe_paths_are_in_the_code(component: str) -> None:
    source = _source(component)
    for path in ("/health/live", "/health/ready", "/metrics"):
        assert path in source


def test_grace_covers_the_drain(rendered: Rendered) -> None:
    for component, owner, service in services_of(rendered):
        variables = environment(service)
        drain = float(variables["TANDEM_SHUTDOWN_GRACE"]) + float(variables.get("TANDEM_DRAIN_DELAY", 0))
        drain += service.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        grace = owner["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
        # What an engine may take beyond its grace: the step that runs, and what the link has still to send.
        assert drain + 25 <= grace, f"{component} would be killed while it drains"


def test_pre_stop_is_there_when_asked() -> None:
    rendered = render(OPTIONS["pre-stop"])
    for _, _, service in services_of(rendered):
        assert service["lifecycle"] == {"preStop": {"sleep": {"seconds": 5}}}


def test_pods_are_restricted(rendered: Rendered) -> None:
    templates = [owner["spec"]["template"]["spec"] for owner in rendered.pod_owners()] + [rendered.one("Pod")["spec"]]
    with_token = [rendered.one("Deployment")["spec"]["template"]["spec"]] if rendered.of_kind("Role") else []
    for pod in templates:
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["runAsUser"] > 0
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is (pod in with_token)
        assert pod["enableServiceLinks"] is False, "a Service called tandem would set TANDEM_PORT"
        for each in [*pod["containers"], *pod.get("initContainers", [])]:
            if each["name"] in ("side", "init"):
                continue
            assert each["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }


def test_only_frontends_that_watch_endpoint_slices_may_ask_the_api_and_for_nothing_else() -> None:
    assert render().of_kind("Role") == render().of_kind("RoleBinding") == []
    for account in ({"create": True}, {"create": False, "name": "mine"}):
        rendered = render({"frontend.discovery": "kubernetes", "frontend.serviceAccount": account}, namespace="models")
        role, binding = rendered.one("Role"), rendered.one("RoleBinding")
        assert role["rules"] == [
            {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["get", "list", "watch"]}
        ]
        assert binding["roleRef"]["name"] == role["metadata"]["name"]
        used = rendered.one("Deployment")["spec"]["template"]["spec"]["serviceAccountName"]
        assert binding["subjects"] == [{"kind": "ServiceAccount", "name": used, "namespace": "models"}]


def test_every_mount_has_its_volume(rendered: Rendered) -> None:
    for owner in rendered.pod_owners():
        pod = owner["spec"]["template"]["spec"]
        volumes = [volume["name"] for volume in pod["volumes"]]
        volumes += [claim["metadata"]["name"] for claim in owner["spec"].get("volumeClaimTemplates", [])]
        assert len(volumes) == len(set(volumes))
        for each in [*pod["containers"], *pod.get("initContainers", [])]:
            mounts = each.get("volumeMounts", [])
            assert {mount["name"] for mount in mounts} <= set(volumes)
            assert len({mount["mountPath"] for mount in mounts}) == len(mounts)
    for _, _, service in services_of(rendered):
        variables = environment(service)
        writable = [mount["mountPath"] for mount in service["volumeMounts"] if not mount.get("readOnly")]
        assert "/tmp" in writable
        assert variables["HF_HOME"] in writable or variables.get("HF_HUB_OFFLINE") == "1"


def test_replicas_are_left_to_the_autoscaler(rendered: Rendered) -> None:
    scaled = {
        scaler["spec"]["scaleTargetRef"]["name"]
        for scaler in [*rendered.of_kind("HorizontalPodAutoscaler"), *rendered.of_kind("ScaledObject")]
    }
    for owner in rendered.pod_owners():
        assert ("replicas" in owner["spec"]) == (owner["metadata"]["name"] not in scaled)


def test_network_policies_close_the_link_and_the_probes() -> None:
    engine = render().one("NetworkPolicy", "engine")
    link, probes = engine["spec"]["ingress"]
    assert link["ports"] == [{"port": "link"}]
    frontend_pods = render().one("Deployment")["spec"]["selector"]["matchLabels"]
    assert link["from"] == [{"podSelector": {"matchLabels": frontend_pods}}]
    assert probes["ports"] == [{"port": "probes"}]
    assert probes["from"][0]["podSelector"]["matchLabels"] == {"app.kubernetes.io/name": "prometheus"}
    closed = render(OPTIONS["closed policies"])
    assert len(closed.one("NetworkPolicy", "engine")["spec"]["ingress"]) == 1
    (rule,) = closed.one("NetworkPolicy", "frontend")["spec"]["ingress"]
    test_pod = closed.one("Pod")["metadata"]["labels"]
    assert any(
        peer["podSelector"].get("matchLabels", {"no": "no"}).items() <= test_pod.items() for peer in rule["from"]
    )


def test_ingress_keeps_streams_streaming() -> None:
    rendered = render(OPTIONS["ingress"] | {"frontend.settings.max_body_bytes": 83886080})
    ingress = rendered.one("Ingress")
    nginx = {name.rpartition("/")[2]: value for name, value in ingress["metadata"]["annotations"].items()}
    assert nginx["proxy-buffering"] == "off"
    assert int(nginx["proxy-read-timeout"]) >= 600
    assert nginx["proxy-body-size"] == "83886080"
    assert environment(container(rendered.one("Deployment")))["TANDEM_MAX_BODY_BYTES"] == "83886080"
    default = render(OPTIONS["ingress"]).one("Ingress")["metadata"]["annotations"]
    assert default["nginx.ingress.kubernetes.io/proxy-body-size"] == str(
        FrontendSettings.model_fields["max_body_bytes"].default
    )
    paths = [path["path"] for path in ingress["spec"]["rules"][0]["http"]["paths"]]
    assert "/v1" in paths
    assert not any("/metrics".startswith(path) for path in paths)
    route = render(OPTIONS["http route"]).one("HTTPRoute")["spec"]["rules"][0]
    assert route["timeouts"] == {"request": "0s", "backendRequest": "0s"}
    backend = rendered.one("Service", "frontend")
    assert route["backendRefs"] == [{"name": backend["metadata"]["name"], "port": backend["spec"]["ports"][0]["port"]}]


def test_engines_scale_on_waiting_requests() -> None:
    (trigger,) = render(OPTIONS["keda"]).one("ScaledObject")["spec"]["triggers"]
    assert trigger["metadata"]["query"] == (
        'sum(tandem_engine_requests_waiting{namespace="default",pod=~"tandem-engine-default-[0-9]+"})'
    )
    (metric,) = render(OPTIONS["hpa"]).one("HorizontalPodAutoscaler", "engine")["spec"]["metrics"]
    assert metric["pods"]["metric"] == {"name": "tandem_engine_requests_waiting"}


def test_pod_monitors_scrape_ports_that_pods_have() -> None:
    rendered = render(OPTIONS["pod monitor"])
    ports = {component: {port["name"] for port in service["ports"]} for component, _, service in services_of(rendered)}
    for monitor in rendered.of_kind("PodMonitor"):
        component = monitor["metadata"]["labels"]["app.kubernetes.io/component"]
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        assert endpoint["path"] == "/metrics"
        assert endpoint["port"] in ports[component]
        assert monitor["metadata"]["labels"]["release"] == "prometheus"


def test_cpu_limits_set_the_threads_of_a_cpu_engine() -> None:
    limited = {"engine.gpus": 0, "engine.resources.limits": {"cpu": "4"}}
    (threads,) = [v for v in container(render(limited).one("StatefulSet"))["env"] if v["name"] == "TANDEM_THREADS"]
    assert threads["valueFrom"]["resourceFieldRef"] == {"containerName": "engine", "resource": "limits.cpu"}
    chosen = limited | {"engine.settings.threads": 2}
    (threads,) = [v for v in container(render(chosen).one("StatefulSet"))["env"] if v["name"] == "TANDEM_THREADS"]
    assert threads == {"name": "TANDEM_THREADS", "value": "2"}


def test_download_fetches_into_the_cache_that_the_engine_reads() -> None:
    stateful_set = render(OPTIONS["download"]).one("StatefulSet")
    (download,) = stateful_set["spec"]["template"]["spec"]["initContainers"]
    assert [*download["command"], *download["args"]][:4] == [
        "hf", "download", "HuggingFaceTB/SmolLM2-135M-Instruct", "--revision=main",
    ]  # fmt: skip
    assert environment(download)["HF_HOME"] == environment(container(stateful_set))["HF_HOME"]


def test_frontends_mount_a_model_that_is_a_path() -> None:
    deployment = render(OPTIONS["cache: path"]).one("Deployment")
    (mount,) = [m for m in container(deployment)["volumeMounts"] if m["mountPath"] == "/models"]
    assert mount["readOnly"] is True
    (volume,) = [v for v in deployment["spec"]["template"]["spec"]["volumes"] if v["name"] == mount["name"]]
    assert volume["hostPath"]["path"] == "/srv/m"


def test_traces_are_asked_for_by_the_variables_that_the_services_obey(monkeypatch: pytest.MonkeyPatch) -> None:
    from opentelemetry.sdk.trace.sampling import ParentBased

    from shared.span_export import SpanExport

    for variable in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(variable)
    for component, _, service in services_of(render(OPTIONS["traces"])):
        variables = {variable["name"]: variable for variable in service["env"]}
        assert variables["OTEL_EXPORTER_OTLP_HEADERS"]["valueFrom"]["secretKeyRef"] == {
            "name": "headers",
            "key": "headers",
        }
        names = [variable["name"] for variable in service["env"]]
        assert names.index("POD_NAME") < names.index("OTEL_RESOURCE_ATTRIBUTES"), "only earlier variables are expanded"
        with monkeypatch.context() as patched:
            for name, value in environment(service).items():
                if name.startswith("OTEL_"):
                    patched.setenv(name, value)
            export = SpanExport(component, exporters=[])
            sampler = export._sampler
            assert isinstance(sampler, ParentBased)
            assert "0.1" in sampler.get_description()
            assert export._provider.resource.attributes["k8s.container.name"] == component
    for _, _, service in services_of(render()):
        assert not [variable for variable in service["env"] if variable["name"].startswith("OTEL_")]
