"""Renders the chart with real helm, each set of values once, and gives what the tests ask of manifests."""

import functools
import json
import os
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.chart.kube_tools import tool

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts/tandem"
EXAMPLES = sorted((CHART / "examples").glob("*.yaml"))
# Chart.yaml's kubeVersion, and the newest that kubernetes-validate knows.
OLDEST_KUBERNETES = "1.30"
NEWEST_KUBERNETES = "1.37"

Manifest = dict[str, Any]


class RenderingFailed(Exception):
    """helm refused; the text is what it said."""


@dataclass(frozen=True)
class Rendered:
    """The manifests of one rendering."""

    manifests: tuple[Manifest, ...]

    def of_kind(self, kind: str, component: str | None = None) -> list[Manifest]:
        return [
            manifest
            for manifest in self.manifests
            if manifest["kind"] == kind
            and (component is None or manifest["metadata"]["labels"]["app.kubernetes.io/component"] == component)
        ]

    def one(self, kind: str, component: str | None = None) -> Manifest:
        found = self.of_kind(kind, component)
        assert len(found) == 1, f"{len(found)} {kind}s of component {component}, not one"
        return found[0]

    def pod_owners(self) -> Iterator[Manifest]:
        """Manifests that own a pod template: the Deployment and the StatefulSets."""
        yield from self.of_kind("Deployment")
        yield from self.of_kind("StatefulSet")


def helm(*arguments: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    """Run helm with a home of its own and no cluster; the caller judges the exit status."""
    environment = {"PATH": os.environ["PATH"], "HOME": tempfile.gettempdir(), "KUBECONFIG": os.devnull}
    command = [str(tool("helm")), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=environment, check=False)


def value_arguments(values: Mapping[str, Any] | None, files: tuple[Path, ...]) -> list[str]:
    arguments = [argument for file in files for argument in ("--values", str(file))]
    for name, value in (values or {}).items():
        arguments += ["--set-json", f"{name}={json.dumps(value)}"]
    return arguments


def render(
    values: Mapping[str, Any] | None = None,
    *files: Path,
    release: str = "tandem",
    namespace: str = "default",
    kubernetes: str = NEWEST_KUBERNETES,
) -> Rendered:
    """`helm template` with values by dotted path. Raises RenderingFailed with helm's message."""
    arguments = value_arguments(values, files)
    return _render(tuple(arguments), release, namespace, kubernetes)


@functools.cache
def _render(arguments: tuple[str, ...], release: str, namespace: str, kubernetes: str) -> Rendered:
    done = helm("template", release, str(CHART), "-n", namespace, "--kube-version", f"{kubernetes}.0", *arguments)
    if done.returncode:
        raise RenderingFailed(done.stderr)
    return Rendered(tuple(doc for doc in yaml.load_all(done.stdout, yaml.CSafeLoader) if doc))


def container(owner: Manifest) -> Manifest:
    """The service's own container of a pod owner: the first."""
    return owner["spec"]["template"]["spec"]["containers"][0]


def environment(container: Manifest) -> dict[str, str]:
    """The variables of a container that have a plain value."""
    return {variable["name"]: variable["value"] for variable in container["env"] if "value" in variable}
