"""Compiles the C kernels beside this file for this very machine at first use, and loads them.

The library goes to the user's cache, under a name that changes with the sources, the compiler and the processor.
Where there is no C compiler, callers take their PyTorch implementations: slower, and never wrong.
"""

import ctypes
import hashlib
import logging
import os
import platform
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

MAX_HEAD_DIM = 256  # as in the sources
MAX_QUERY_GROUP = 64  # query heads of one KV head: MAX_TILE_ROWS in paged_attention.c
DTYPE_SUFFIXES = {torch.bfloat16: "bf16", torch.float32: "f32"}

_FOLDER = Path(__file__).parent
_SOURCES = ("decoder_ops.c", "paged_attention.c")
_FLAGS = ("-O3", "-march=native", "-fopenmp", "-fPIC", "-fno-math-errno")
_COMPILE_SECONDS = 120


class Kernels:
    """The library, twice: `quick` keeps Python's interpreter lock (its calls take microseconds, and taking the
    lock again may take milliseconds while another thread is busy); `long` gives it away."""

    def __init__(self, path: Path) -> None:
        self.quick = ctypes.PyDLL(str(path))
        self.long = ctypes.CDLL(str(path))


@cache
def load_kernels() -> Kernels | None:
    """The kernels, compiled if need be (about two seconds, once); None where that is not possible."""
    try:
        return Kernels(_compiled_library())
    except (OSError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", None) or str(error)
        logger.warning(
            "The CPU kernels cannot be compiled, so slower PyTorch code runs instead. Install a C compiler (gcc) "
            "with OpenMP to change that. Reason: %s",
            reason.strip().split("\n")[0],
        )
        return None


def _compiled_library() -> Path:
    compiler = os.environ.get("CC", "cc")
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, text=True, check=True, timeout=_COMPILE_SECONDS
    ).stdout
    openmp = _torch_openmp()
    digest = hashlib.sha256(repr((version, _FLAGS, str(openmp), _processor())).encode())
    for path in sorted(_FOLDER.glob("*.[ch]")):
        digest.update(path.read_bytes())
    name = f"kernels-{digest.hexdigest()[:16]}.so"
    library = _cache_folder() / name
    if library.exists():
        return library
    with tempfile.TemporaryDirectory(dir=library.parent) as build:
        objects = [str(Path(build) / f"{source}.o") for source in _SOURCES]
        # Linked against the OpenMP that PyTorch has loaded: a second one would bring a second set of threads, and
        # each set spins on the cores while it waits for the other.
        link = [
            compiler,
            "-shared",
            *objects,
            "-o",
            f"{build}/{name}",
            *([str(openmp)] if openmp else ["-fopenmp"]),
            "-lm",
        ]
        commands = [
            [compiler, *_FLAGS, "-c", str(_FOLDER / source), "-o", object_]
            for source, object_ in zip(_SOURCES, objects, strict=True)
        ]
        for command in [*commands, link]:
            subprocess.run(command, capture_output=True, text=True, check=True, timeout=_COMPILE_SECONDS)
        # Atomic, so that engines that start together each find a whole file.
        os.replace(f"{build}/{name}", library)
    return library


def _torch_openmp() -> Path | None:
    found = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    found += sorted((Path(torch.__file__).parent.parent / "torch.libs").glob("libgomp*.so*"))
    return found[0] if found else None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n")
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "tandem" / "kernels"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    # A read-only home, as containers have it: compiled anew by each process.
    return Path(tempfile.mkdtemp(prefix="tandem-kernels-"))
