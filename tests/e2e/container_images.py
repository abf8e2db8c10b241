"""Builds both images from their Dockerfiles, as `make images` does, on a machine that may reach no container registry.

TANDEM_E2E_BASE names a base image; by default it is the Dockerfiles' own where that is here already, else a Debian with
Python that debootstrap makes once.
"""

import os
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path

from tests.e2e.podman import PODMAN_ENVIRONMENT, STORAGE, CannotRunContainers, podman

ROOT = Path(__file__).parents[2]
PUBLIC_BASE = "docker.io/library/python:3.11-slim-bookworm"
LOCAL_BASE = "localhost/python:3"
DEBIAN = "bookworm"
TORCH_FOR_CPU = "https://download.pytorch.org/whl/cpu/torch/"
DEBOOTSTRAP_SECONDS = 600
BUILD_SECONDS = 900
# As the Dockerfiles do it: pip, uv and Debian's packages in a build.
_CHECK = """\
FROM {base}
RUN python3 -m venv /x && /x/bin/pip install --quiet uv && apt-get update -qq \\
 && UV_SYSTEM_CERTS=true /x/bin/uv pip install --quiet --target /y dumb-init
"""


def image_exists(name: str) -> bool:
    return podman("image", "exists", name, check=False).returncode == 0


def base_image() -> str:
    """Raises CannotRunContainers where there is none and none can be made."""
    if named := os.environ.get("TANDEM_E2E_BASE"):
        return named
    if image_exists(PUBLIC_BASE):
        return PUBLIC_BASE
    if not image_exists(LOCAL_BASE):
        with tempfile.TemporaryDirectory(dir=STORAGE) as folder:
            packages = "--include=python3,python3-venv,ca-certificates"
            command = ["debootstrap", "--variant=minbase", packages, DEBIAN, folder]
            try:
                done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=DEBOOTSTRAP_SECONDS)
            except subprocess.TimeoutExpired as error:
                raise CannotRunContainers(f"debootstrap did not end within {DEBOOTSTRAP_SECONDS} s") from error
            if done.returncode:
                raise CannotRunContainers(f"debootstrap cannot make a base image: {done.stdout.strip()[-300:]}")
            with subprocess.Popen(["tar", "-C", folder, "-c", "."], stdout=subprocess.PIPE) as tar:
                podman("import", "--quiet", "-", LOCAL_BASE, stdin=tar.stdout)
    return LOCAL_BASE


def check_that_builds_reach_packages(base: str) -> None:
    """Raises CannotRunContainers where a build runs and finds neither PyPI nor Debian."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "Dockerfile").write_text(_CHECK.format(base=base))
        command = [*_BUILDAH, "--volume", "/etc/ssl/certs:/etc/ssl/certs:ro", "--tag", "localhost/tandem-check", folder]
        done = _run(command, 180)
    podman("image", "rm", "--force", "localhost/tandem-check", check=False)
    if done.returncode:
        raise CannotRunContainers(f"a build cannot fetch packages here: {(done.stdout + done.stderr).strip()[-400:]}")


_BUILDAH = ["buildah", "bud", "--layers", "--force-rm", "--isolation", "chroot"]


def _run(command: list[str], seconds: float) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, cwd=ROOT, env=PODMAN_ENVIRONMENT, capture_output=True, text=True, check=False, timeout=seconds
        )
    except subprocess.TimeoutExpired as error:
        said = (error.stdout or b"").decode(errors="replace") if isinstance(error.stdout, bytes) else ""
        return subprocess.CompletedProcess(command, 124, said, f"it did not end within {seconds:g} s")


def _reaches(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=20):
            return True
    except OSError:
        return False


def build(service: str) -> str:
    """Build the image of `frontend` or `engine`; its name. Layers that did not change are not built again."""
    name = f"localhost/tandem-{service}:e2e"
    arguments = {"BASE": base_image(), "VERSION": "e2e"}
    volumes = ["/etc/ssl/certs:/etc/ssl/certs:ro"]
    wheels = os.environ.get("PIP_FIND_LINKS", "")
    if wheels and Path(wheels).is_dir():
        arguments["UV_FIND_LINKS"] = wheels
        volumes.append(f"{wheels}:{wheels}:ro")
    if service == "engine":
        here = wheels and list(Path(wheels).glob("torch-*+cpu-*.whl"))
        if not here and not _reaches(TORCH_FOR_CPU):
            raise CannotRunContainers(f"no torch for CPUs: neither in PIP_FIND_LINKS nor at {TORCH_FOR_CPU}")
        arguments |= {"ACCELERATOR": "cpu", "TORCH_BACKEND": "" if here else "cpu"}
    command = [*_BUILDAH, "--file", f"Dockerfile.{service}", "--tag", name]
    command += [argument for volume in volumes for argument in ("--volume", volume)]
    command += [argument for pair in arguments.items() for argument in ("--build-arg", "=".join(pair))]
    started = time.monotonic()
    done = _run([*command, "."], BUILD_SECONDS)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{(done.stdout + done.stderr)[-3000:]}")
    size = int(podman("image", "inspect", "--format", "{{.Size}}", name).stdout)
    print(f"{name}: built in {time.monotonic() - started:.0f} s, {size / 1e6:.0f} MB")
    return name
