"""Runs pods of rendered manifests as containers, as a kubelet would: environment, arguments, volumes, user, probes and
grace period come from the manifest; a headless Service's name is a network alias of every pod that it selects."""

import base64
import math
import os
import shutil
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chart.rendering import Manifest, Rendered
from tests.e2e.podman import podman


@dataclass
class Pod:
    """One running container of a pod owner, and what its probes said last."""

    name: str
    owner: Manifest
    address: str
    changed: Callable[[], None]
    ready: bool = False
    terminating: bool = False
    failed: str | None = None
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    @property
    def component(self) -> str:
        return self.owner["metadata"]["labels"]["app.kubernetes.io/component"]

    @property
    def container(self) -> Manifest:
        return self.owner["spec"]["template"]["spec"]["containers"][0]

    def port(self, name: str) -> int:
        return next(port["containerPort"] for port in self.container["ports"] if port["name"] == name)

    def get(self, port: str, path: str, timeout: float = 5) -> tuple[int, str]:
        """Status and body; status 0 where nobody answers."""
        try:
            url = f"http://{self.address}:{self.port(port)}{path}"
            with urllib.request.urlopen(url, timeout=timeout) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode(errors="replace")
        except OSError as error:
            return 0, str(error)

    def start_probes(self) -> None:
        self._thread = threading.Thread(target=self._probe, name=f"probes of {self.name}")
        self._thread.start()

    def stop_probes(self) -> None:
        self._stop.set()
        if self._thread:
            self._thread.join()

    def _probe(self) -> None:
        if not self._until_started():
            return
        due = {"readiness": 0.0, "liveness": 0.0}
        failures = dict.fromkeys(due, 0)
        while not self._stop.is_set():
            for kind in due:
                probe = self.container[f"{kind}Probe"]
                if time.monotonic() < due[kind]:
                    continue
                due[kind] = time.monotonic() + probe["periodSeconds"]
                passed = self._passes(probe)
                failures[kind] = 0 if passed else failures[kind] + 1
                if kind == "readiness" and (passed or failures[kind] >= probe["failureThreshold"]):
                    self._set_ready(passed)
                if kind == "liveness" and failures[kind] >= probe["failureThreshold"] and not self.terminating:
                    self.failed = "its liveness probe failed"
                    return
            self._stop.wait(0.1)

    def _until_started(self) -> bool:
        probe = self.container["startupProbe"]
        for _ in range(probe["failureThreshold"]):
            if self._passes(probe):
                return True
            if self._stop.wait(probe["periodSeconds"]):
                return False
        self.failed = "its startup probe failed to the last"
        return False

    def _passes(self, probe: Manifest) -> bool:
        get = probe["httpGet"]
        return 200 <= self.get(get["port"], get["path"], probe["timeoutSeconds"])[0] < 400

    def _set_ready(self, ready: bool) -> None:
        if ready != self.ready:
            self.ready = ready
            self.changed()


class Cluster:
    """A private network with DNS, and the pods of one rendering on it."""

    def __init__(self, rendered: Rendered, folder: Path, changed: Callable[[], None]) -> None:
        self.rendered = rendered
        self.network = f"tandem-e2e-{os.getpid()}-{time.monotonic_ns() % 10**6}"
        self.pods: list[Pod] = []
        self._folder = folder
        self._changed = changed
        self._count = 0
        podman("network", "create", self.network)

    def close(self) -> None:
        for pod in self.pods:
            pod.stop_probes()
        for pod in self.pods:
            podman("rm", "--force", "--time", "0", pod.name, check=False)
        podman("network", "rm", "--force", self.network, check=False)

    @property
    def gateway(self) -> str:
        return podman("network", "inspect", "--format", "{{(index .Subnets 0).Gateway}}", self.network).stdout.strip()

    def of(self, component: str) -> list[Pod]:
        return [pod for pod in self.pods if pod.component == component]

    def start(self, owner: Manifest) -> Pod:
        """Start one more pod of a Deployment or StatefulSet."""
        self._count += 1
        name = f"{self.network}-{owner['metadata']['name']}-{self._count}"
        template = owner["spec"]["template"]
        spec = template["spec"]
        arguments = ["--detach", "--name", name, "--network", self.network]
        for service in self.rendered.of_kind("Service"):
            headless = service["spec"].get("clusterIP") == "None"
            if headless and service["spec"]["selector"].items() <= template["metadata"]["labels"].items():
                arguments += ["--network-alias", service["metadata"]["name"]]
        self._run(name, owner, spec, arguments)
        address = podman(
            "inspect", "--format", f'{{{{(index .NetworkSettings.Networks "{self.network}").IPAddress}}}}', name
        ).stdout.strip()
        pod = Pod(name, owner, address, self._changed)
        self.pods.append(pod)
        pod.start_probes()
        return pod

    def run_to_end(self, manifest: Manifest, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a bare pod, such as the chart's test."""
        name = f"{self.network}-{manifest['metadata']['name']}"
        return self._run(
            name,
            manifest,
            manifest["spec"],
            ["--rm", "--name", name, "--network", self.network, *arguments],
            check=False,
        )

    def kill(self, pod: Pod) -> None:
        """As a node that goes dark: no signal that it could act on."""
        pod.terminating = True
        pod.stop_probes()
        podman("kill", "--signal", "KILL", pod.name)
        self._remove(pod)

    def terminate(self, pod: Pod) -> int:
        """As the API's delete: out of the endpoints, SIGTERM, and SIGKILL past the grace period. The exit status."""
        pod.terminating = True
        self._changed()
        grace = pod.owner["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
        podman("stop", "--time", str(grace), pod.name)
        status = int(podman("inspect", "--format", "{{.State.ExitCode}}", pod.name).stdout)
        pod.stop_probes()
        self._remove(pod)
        return status

    def logs(self) -> str:
        parts = []
        for pod in self.pods:
            done = podman("logs", "--tail", "30", pod.name, check=False)
            parts.append(
                f"--- {pod.name} (ready {pod.ready}, {pod.failed})\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
            )
        return "\n".join(parts)

    def _remove(self, pod: Pod) -> None:
        self.pods.remove(pod)
        podman("rm", "--force", "--time", "0", pod.name, check=False)
        self._changed()

    def _run(
        self, name: str, owner: Manifest, spec: Manifest, arguments: list[str], check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        (container, *others) = spec["containers"]
        if others or spec.get("initContainers"):
            raise NotImplementedError("pods with several containers")
        security = {**spec.get("securityContext", {}), **container.get("securityContext", {})}
        arguments = [*arguments, "--user", f"{security['runAsUser']}:{security['runAsGroup']}"]
        arguments += ["--group-add", str(security["fsGroup"])]
        if security.get("readOnlyRootFilesystem"):
            # podman would put writable file systems of its own over /tmp and /run.
            arguments += ["--read-only", "--read-only-tmpfs=false"]
        if not security.get("allowPrivilegeEscalation", True):
            arguments += ["--security-opt", "no-new-privileges"]
        arguments += [
            part for drop in security.get("capabilities", {}).get("drop", []) for part in ("--cap-drop", drop)
        ]
        for variable in container.get("env", []):
            arguments += ["--env", f"{variable['name']}={self._value(variable, container)}"]
        for mount in container.get("volumeMounts", []):
            arguments += self._mount(mount, owner, spec, name, security["fsGroup"])
        if command := container.get("command"):
            arguments += ["--entrypoint", command[0]]
        full = ["run", *arguments, container["image"], *container.get("command", [""])[1:], *container.get("args", [])]
        return podman(*full, check=check)

    def _value(self, variable: Manifest, container: Manifest) -> str:
        if "value" in variable:
            return variable["value"]
        source = variable["valueFrom"]
        if "secretKeyRef" in source:
            return self.secret(source["secretKeyRef"]["name"])[source["secretKeyRef"]["key"]]
        limit = container["resources"]["limits"][source["resourceFieldRef"]["resource"].removeprefix("limits.")]
        cores = float(limit[:-1]) / 1000 if str(limit).endswith("m") else float(limit)
        return str(math.ceil(cores))

    def secret(self, name: str) -> dict[str, str]:
        secret = next(s for s in self.rendered.of_kind("Secret") if s["metadata"]["name"] == name)
        return {key: base64.b64decode(value).decode() for key, value in secret["data"].items()}

    def _mount(self, mount: Manifest, owner: Manifest, spec: Manifest, pod: str, group: int) -> list[str]:
        volume = next((v for v in spec.get("volumes", []) if v["name"] == mount["name"]), None)
        options = "ro" if mount.get("readOnly") else "rw"
        if volume and volume.get("emptyDir", {}).get("medium") == "Memory":
            if mount["mountPath"] == "/dev/shm":
                return ["--shm-size", volume["emptyDir"]["sizeLimit"].removesuffix("i").lower()]
            return ["--tmpfs", f"{mount['mountPath']}:{options}"]
        if volume and "hostPath" in volume:
            return ["--volume", f"{volume['hostPath']['path']}:{mount['mountPath']}:{options}"]
        folder = self._folder / pod / mount["name"]
        content: dict[str, str] = {}
        if volume and "secret" in volume:
            content = self.secret(volume["secret"]["secretName"])
            if items := volume["secret"].get("items"):
                content = {item["path"]: content[item["key"]] for item in items}
        elif volume and "configMap" in volume:
            maps = self.rendered.of_kind("ConfigMap")
            content = next(m for m in maps if m["metadata"]["name"] == volume["configMap"]["name"])["data"]
        elif volume and "emptyDir" not in volume:
            raise NotImplementedError(f"{owner['metadata']['name']}: volume {volume}")
        folder.mkdir(parents=True)
        for key, text in content.items():
            (folder / key).write_text(text)
            os.chown(folder / key, 0, group)
            (folder / key).chmod(0o440)
        os.chown(folder, 0, group)
        folder.chmod(0o2770)
        return ["--volume", f"{folder}:{mount['mountPath']}:{options}"]


def wait_for(condition: Callable[[], Any], what: str, timeout: float = 120) -> Any:
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{timeout:.0f} s passed without {what}")
        time.sleep(0.05)
    return value


def remove_folder(folder: Path) -> None:
    """What containers wrote belongs to their user."""
    shutil.rmtree(folder, ignore_errors=True)
