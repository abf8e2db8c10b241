"""podman, with the settings that let it run as root in a container or a small virtual machine."""

import os
import shutil
import subprocess
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


def _environment() -> dict[str, str]:
    if "CONTAINERS_CONF" in os.environ:
        return dict(os.environ)
    path = Path(tempfile.gettempdir()) / f"tandem-containers-{os.getuid()}.conf"
    path.write_text(_CONTAINERS_CONF)
    return {**os.environ, "CONTAINERS_CONF": str(path)}


PODMAN_ENVIRONMENT = _environment()


def why_not() -> str | None:
    """Why containers cannot be run here, or None."""
    missing = [name for name in ("podman", "buildah", "runc", "netavark", "nginx") if not _find(name)]
    if missing:
        return f"not installed: {', '.join(missing)}"
    if os.getuid() != 0:
        return "needs root, for networks and the base image"
    done = podman("info", check=False)
    return None if done.returncode == 0 else f"podman does not run here: {done.stderr.strip()[-200:]}"


def _find(name: str) -> str | None:
    return shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin:/usr/lib/podman")


def podman(*arguments: str, check: bool = True, stdin: IO[Any] | None = None) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        ["podman", *arguments],
        env=PODMAN_ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        stdin=stdin or subprocess.DEVNULL,
    )
    if check and done.returncode:
        raise RuntimeError(f"podman {' '.join(arguments)[:300]} failed: {done.stderr.strip()[-1000:]}")
    return done
