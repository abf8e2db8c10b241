"""Secrets are made once: an upgrade that finds them in the cluster keeps them. The cluster is an API server on loopback
that answers what helm asks when it renders against one."""

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from shared.link_keys import read_link_keys
from tests.chart.rendering import CHART, Rendered, helm, render, value_arguments

GENERATED = {"apiKeys.enabled": True}
# What the chart makes by default, by API version.
KINDS = {
    "v1": ["Secret", "Service", "ServiceAccount", "Pod"],
    "apps/v1": ["Deployment", "StatefulSet"],
    "policy/v1": ["PodDisruptionBudget"],
    "networking.k8s.io/v1": ["NetworkPolicy"],
}


class ClusterWithSecrets:
    """The discovery documents and Secrets of a Kubernetes API server."""

    def __init__(self) -> None:
        self.secrets: dict[str, dict[str, Any]] = {}
        cluster = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                answer = cluster.answer(self.path.partition("?")[0])
                body = json.dumps(answer or {"kind": "Status", "status": "Failure", "reason": "NotFound", "code": 404})
                self.send_response(200 if answer else 404)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body.encode())

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def install(self, secret: dict[str, Any]) -> None:
        """Keep a Secret as helm would have made it, with its owner's name."""
        owner = {"meta.helm.sh/release-name": "tandem", "meta.helm.sh/release-namespace": "default"}
        metadata = {**secret["metadata"], "annotations": {**secret["metadata"]["annotations"], **owner}}
        self.secrets[secret["metadata"]["name"]] = {**secret, "metadata": metadata}

    def answer(self, path: str) -> dict[str, Any] | None:
        if path == "/version":
            return {"major": "1", "minor": "37", "gitVersion": "v1.37.0"}
        if path == "/api":
            return {"kind": "APIVersions", "versions": ["v1"]}
        if path == "/apis":
            versions = [{"groupVersion": version, "version": version.partition("/")[2]} for version in KINDS]
            groups = [
                {"name": each["groupVersion"].partition("/")[0], "versions": [each], "preferredVersion": each}
                for each in versions
                if each["version"]
            ]
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}
        version = path.removeprefix("/apis/").removeprefix("/api/")
        if version in KINDS:
            resources = [
                {"name": f"{kind.lower()}s", "namespaced": True, "kind": kind, "verbs": ["get"]}
                for kind in KINDS[version]
            ]
            return {"kind": "APIResourceList", "groupVersion": version, "resources": resources}
        return self.secrets.get(path.removeprefix("/api/v1/namespaces/default/secrets/"))


@pytest.fixture
def cluster() -> Iterator[ClusterWithSecrets]:
    cluster = ClusterWithSecrets()
    serving = threading.Thread(target=cluster.server.serve_forever, kwargs={"poll_interval": 0.02})
    serving.start()
    yield cluster
    cluster.server.shutdown()
    serving.join()
    cluster.server.server_close()


def render_against(cluster: ClusterWithSecrets, values: dict[str, Any]) -> Rendered:
    """As an upgrade renders: `lookup` asks the cluster."""
    against = ["--dry-run=server", "--kube-apiserver", cluster.url, "--disable-openapi-validation"]
    done = helm("template", "tandem", str(CHART), *against, *value_arguments(values, ()))
    assert done.returncode == 0, done.stderr
    return Rendered(tuple(doc for doc in yaml.safe_load_all(done.stdout) if doc))


def keys_of(secret: dict[str, Any]) -> list[str]:
    return base64.b64decode(secret["data"]["keys"]).decode().split()


def checksum(rendered: Rendered) -> str:
    return rendered.one("Deployment")["spec"]["template"]["metadata"]["annotations"]["checksum/api-keys"]


def test_generated_key_is_kept_on_upgrade(cluster: ClusterWithSecrets) -> None:
    installed = render_against(cluster, GENERATED)
    secret = installed.one("Secret")
    (key,) = keys_of(secret)
    assert len(key) >= 40
    assert secret["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"

    cluster.install(secret)
    upgraded = render_against(cluster, GENERATED)
    assert upgraded.one("Secret") == secret
    assert checksum(upgraded) == checksum(installed), "the upgrade would restart the frontends for nothing"


def test_another_install_gets_another_key(cluster: ClusterWithSecrets) -> None:
    assert render_against(cluster, GENERATED).one("Secret") != render_against(cluster, GENERATED).one("Secret")


def test_given_keys_win_and_restart_the_frontends(cluster: ClusterWithSecrets) -> None:
    installed = render_against(cluster, GENERATED)
    cluster.install(installed.one("Secret"))
    rotated = render_against(cluster, {"apiKeys": {"enabled": True, "keys": ["new", "old"]}})
    assert keys_of(rotated.one("Secret")) == ["new", "old"]
    assert checksum(rotated) != checksum(installed)


def test_a_secret_of_mine_is_used_and_none_is_made() -> None:
    rendered = render({"apiKeys": {"enabled": True, "existingSecret": "mine", "key": "tokens"}})
    assert not rendered.of_kind("Secret")
    for pod in (rendered.one("Deployment")["spec"]["template"]["spec"], rendered.one("Pod")["spec"]):
        assert {"name": "api-keys", "secret": {"secretName": "mine"}} in pod["volumes"]
    (service, *_) = rendered.one("Deployment")["spec"]["template"]["spec"]["containers"]
    assert {"name": "TANDEM_API_KEY_FILE", "value": "/etc/tandem/api-keys/tokens"} in service["env"]


LINK = {"linkEncryption.enabled": True}
GENERATED_FILES = {"engine.secret", "frontend.secret"}


def pod_of(rendered: Rendered, component: str) -> dict[str, Any]:
    (owner,) = [o for o in rendered.pod_owners() if o["metadata"]["labels"]["app.kubernetes.io/component"] == component]
    return owner["spec"]["template"]


def link_volume(rendered: Rendered, component: str) -> dict[str, Any]:
    (volume,) = [v for v in pod_of(rendered, component)["spec"]["volumes"] if v["name"] == "link-keys"]
    return volume["secret"]


def write_files(secret: dict[str, Any], volume: dict[str, Any], folder: Path) -> Path:
    """What a pod finds where it mounts the Secret."""
    folder.mkdir()
    for item in volume["items"]:
        (folder / item["path"]).write_bytes(base64.b64decode(secret["data"][item["key"]]))
    return folder


def test_generated_link_keys_are_a_pair_for_each_side(tmp_path: Path) -> None:
    rendered = render(LINK)
    secret = rendered.one("Secret")
    assert set(secret["data"]) == GENERATED_FILES
    folders = {
        side: write_files(secret, link_volume(rendered, side), tmp_path / side) for side in ("engine", "frontend")
    }
    engine, frontend = (read_link_keys(folders[side], side) for side in ("engine", "frontend"))
    assert (engine.peers, frontend.peers) == ((frontend.public,), (engine.public,))
    assert engine.secret != frontend.secret
    for side in ("engine", "frontend"):
        (container, *_) = pod_of(rendered, side)["spec"]["containers"]
        (path,) = [v["value"] for v in container["env"] if v["name"] == "TANDEM_LINK_KEYS"]
        assert {"name": "link-keys", "mountPath": path, "readOnly": True} in container["volumeMounts"]
        assert link_volume(rendered, side)["defaultMode"] == 0o440


def test_link_keys_are_kept_on_upgrade_and_a_change_of_them_restarts_both_sides(cluster: ClusterWithSecrets) -> None:
    installed = render_against(cluster, LINK)
    secret = installed.one("Secret")
    assert secret["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    cluster.install(secret)
    upgraded = render_against(cluster, LINK)
    assert upgraded.one("Secret") == secret

    def checksums(rendered: Rendered) -> list[str]:
        return [pod_of(rendered, c)["metadata"]["annotations"]["checksum/link-keys"] for c in ("engine", "frontend")]

    assert checksums(upgraded) == checksums(installed)
    two_lines = base64.b64encode(base64.b64decode(secret["data"]["engine.secret"]) + b"\n" + b"n" * 40).decode()
    secret["data"]["engine.secret"] = two_lines
    cluster.install(secret)
    rotating = render_against(cluster, LINK)
    assert rotating.one("Secret")["data"]["engine.secret"] == two_lines
    assert not set(checksums(rotating)) & set(checksums(installed))


def test_with_link_keys_of_mine_a_pod_sees_its_own_secret_alone() -> None:
    rendered = render({"linkEncryption": {"enabled": True, "existingSecret": "mine"}})
    assert not rendered.of_kind("Secret")
    for side, other in (("engine", "frontend"), ("frontend", "engine")):
        volume = link_volume(rendered, side)
        assert volume["secretName"] == "mine"
        assert [item["key"] for item in volume["items"]] == [f"{side}.secret", f"{other}.public"]
        assert "checksum/link-keys" not in pod_of(rendered, side)["metadata"]["annotations"]


def test_link_keys_are_nowhere_but_in_their_secret() -> None:
    rendered = render(LINK)
    keys = [base64.b64decode(value).decode() for value in rendered.one("Secret")["data"].values()]
    rest = json.dumps([m for m in rendered.manifests if m["kind"] != "Secret"])
    assert not any(key in rest for key in keys)


def test_hub_token_is_a_secret_for_both_services() -> None:
    rendered = render({"huggingFace.token": "hf_secret"})
    secret = rendered.one("Secret")
    assert base64.b64decode(secret["data"]["token"]) == b"hf_secret"
    reference = {"secretKeyRef": {"name": secret["metadata"]["name"], "key": "token"}}
    for owner in rendered.pod_owners():
        (service, *_) = owner["spec"]["template"]["spec"]["containers"]
        assert {"name": "HF_TOKEN", "valueFrom": reference} in service["env"]
    assert "hf_secret" not in json.dumps([m for m in rendered.manifests if m["kind"] != "Secret"])
