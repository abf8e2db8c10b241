"""podman, with the settings that let it run as root in a container or a small virtual machine.

With TANDEM_E2E_STORAGE, a folder, all that is made lies in it: images, containers, networks. To take it away again:
`python -m tests.e2e.podman`. Otherwise images stay with the machine's own, and the next run builds only what changed.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, Any

_CONTAINERS_CONF = """\
[containers]
default_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
"""
_NETWORKS_CONF = """\
[network]
network_config_dir = "{folder}/networks"
"""
_STORAGE_CONF = """\
[storage]
driver = "overlay"
graphroot = "{folder}/images"
runroot = "{folder}/run"
"""

STORAGE = os.environ.get("TANDEM_E2E_STORAGE")
SECONDS = 300


class CannotRunContainers(Exception):
    """This machine cannot do what the run needs of it. The text says what."""


def _environment() -> dict[str, str]:
    if STORAGE:
        folder = Path(STORAGE)
        for name in ("images", "run", "networks"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / "containers.conf").write_text(_CONTAINERS_CONF + _NETWORKS_CONF.format(folder=folder))
        (folder / "storage.conf").write_text(_STORAGE_CONF.format(folder=folder))
        return {
            **os.environ,
            "CONTAINERS_CONF": str(folder / "containers.conf"),
            "CONTAINERS_STORAGE_CONF": str(folder / "storage.conf"),
        }
    if "CONTAINERS_CONF" in os.environ:
        return dict(os.environ)
    path = Path(tempfile.gettempdir()) / f"tandem-containers-{os.getuid()}.conf"
    path.write_text(_CONTAINERS_CONF)
    return {**os.environ, "CONTAINERS_CONF": str(path)}


PODMAN_ENVIRONMENT = _environment()


def why_not() -> str | None:
    """Why containers cannot be run here, or None, as far as can be said without an image."""
    if sys.platform != "linux":
        return "needs Linux"
    missing = [name for name in ("podman", "buildah", "runc", "netavark", "nginx", "debootstrap") if not _find(name)]
    if missing:
        return f"not installed: {', '.join(missing)}"
    if os.getuid() != 0:
        return "needs root, for networks and the base image"
    done = podman("info", check=False, seconds=60)
    return None if done.returncode == 0 else f"podman does not run here: {done.stderr.strip()[-300:]}"


def check_that_containers_run(image: str) -> None:
    """Raises CannotRunContainers where a container on a network of its own does not run."""
    network = f"tandem-e2e-check-{os.getpid()}"
    try:
        for arguments in (
            ["network", "create", network],
            ["run", "--rm", "--network", network, "--network-alias", "check", image, "getent", "hosts", "check"],
        ):
            done = podman(*arguments, check=False, seconds=120)
            if done.returncode:
                raise CannotRunContainers(f"`podman {' '.join(arguments)}` fails here: {done.stderr.strip()[-300:]}")
    finally:
        podman("network", "rm", "--force", network, check=False, seconds=60)


def _find(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/usr/lib/podman")


def podman(
    *arguments: str, check: bool = True, stdin: IO[Any] | None = None, seconds: float = SECONDS
) -> subprocess.CompletedProcess[str]:
    """Run podman; where it takes too long, as one that failed."""
    command = ["podman", *arguments]
    try:
        done = subprocess.run(
            command,
            env=PODMAN_ENVIRONMENT,
            capture_output=True,
            text=True,
            check=False,
            timeout=seconds,
            stdin=stdin or subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        done = subprocess.CompletedProcess(command, 124, "", f"it did not end within {seconds:g} s")
    if check and done.returncode:
        raise RuntimeError(f"podman {' '.join(arguments)[:300]} failed: {done.stderr.strip()[-1000:]}")
    return done


def remove_storage(folder: Path) -> None:
    """Take away all that a run with TANDEM_E2E_STORAGE has left, even one that was killed."""
    podman("rm", "--all", "--force", "--time", "0", check=False, seconds=60)
    names = podman("network", "ls", "--format", "{{.Name}}", check=False, seconds=60).stdout.split()
    for name in names:
        podman("network", "rm", "--force", name, check=False, seconds=60)
    mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    for mount in sorted((each for each in mounts if Path(each).is_relative_to(folder)), reverse=True):
        subprocess.run(["umount", "--lazy", mount], check=False, timeout=60)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    if not STORAGE:
        sys.exit("TANDEM_E2E_STORAGE names no folder: the machine's own images are left alone")
    remove_storage(Path(STORAGE).resolve())
