"""Builds both images from their Dockerfiles, as `make images` does, on a machine that may reach no container registry.

TANDEM_E2E_BASE names a base image; by default it is the Dockerfiles' own where that is here already, else a Debian with
Python that debootstrap makes once.
"""

import os
import subprocess
import tempfile
import time
from pathlib import Path

from tests.e2e.podman import PODMAN_ENVIRONMENT, podman

ROOT = Path(__file__).parents[2]
PUBLIC_BASE = "docker.io/library/python:3.11-slim-bookworm"
LOCAL_BASE = "localhost/python:3"
DEBIAN = "bookworm"


def image_exists(name: str) -> bool:
    return podman("image", "exists", name, check=False).returncode == 0


def base_image() -> str:
    if named := os.environ.get("TANDEM_E2E_BASE"):
        return named
    if image_exists(PUBLIC_BASE):
        return PUBLIC_BASE
    if not image_exists(LOCAL_BASE):
        with tempfile.TemporaryDirectory() as folder:
            packages = "--include=python3,python3-venv,ca-certificates"
            subprocess.run(
                ["debootstrap", "--variant=minbase", packages, DEBIAN, folder], check=True, stdout=subprocess.DEVNULL
            )
            with subprocess.Popen(["tar", "-C", folder, "-c", "."], stdout=subprocess.PIPE) as tar:
                podman("import", "--quiet", "-", LOCAL_BASE, stdin=tar.stdout)
    return LOCAL_BASE


def build(service: str) -> str:
    """Build the image of `frontend` or `engine`; its name. Layers that did not change are not built again."""
    name = f"localhost/tandem-{service}:e2e"
    arguments = {"BASE": base_image(), "VERSION": "e2e"}
    volumes = ["/etc/ssl/certs:/etc/ssl/certs:ro"]
    wheels = os.environ.get("PIP_FIND_LINKS", "")
    if Path(wheels).is_dir():
        arguments["UV_FIND_LINKS"] = wheels
        volumes.append(f"{wheels}:{wheels}:ro")
    if service == "engine":
        here = wheels and list(Path(wheels).glob("torch-*+cpu-*.whl"))
        arguments |= {"ACCELERATOR": "cpu", "TORCH_BACKEND": "" if here else "cpu"}
    command = ["buildah", "bud", "--layers", "--isolation", "chroot", "--file", f"Dockerfile.{service}", "--tag", name]
    command += [argument for volume in volumes for argument in ("--volume", volume)]
    command += [argument for pair in arguments.items() for argument in ("--build-arg", "=".join(pair))]
    started = time.monotonic()
    done = subprocess.run(
        [*command, "."], cwd=ROOT, env=PODMAN_ENVIRONMENT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{(done.stdout + done.stderr)[-3000:]}")
    size = int(podman("image", "inspect", "--format", "{{.Size}}", name).stdout)
    print(f"{name}: built in {time.monotonic() - started:.0f} s, {size / 1e6:.0f} MB")
    return name
