"""Compiles the C programs of the benchmarks at their first use, into the user's cache; where others could write there,
into a folder of this process's own."""

import atexit
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from shared.cache_folder import own_cache_folder


class NoCompiler(RuntimeError):
    """There is no C compiler on this machine."""


@functools.cache
def compiled(source: Path, *flags: str) -> Path:
    """What the compiler makes of one file. Raises NoCompiler."""
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
    if compiler is None:
        raise NoCompiler(f"{source.name} is compiled at its first use, and there is no cc: install gcc")
    digest = hashlib.sha256(repr((flags, source.read_bytes())).encode()).hexdigest()[:16]
    target = _folder() / f"{source.stem}-{digest}"
    if not target.exists():
        temporary = target.with_suffix(f".{os.getpid()}")
        subprocess.run([compiler, *flags, "-o", str(temporary), str(source)], check=True)
        temporary.replace(target)
    return target


@functools.cache
def _folder() -> Path:
    folder = own_cache_folder("benchmarks")
    if folder is None:
        fresh = tempfile.TemporaryDirectory(prefix="tandem-benchmarks-")
        atexit.register(fresh.cleanup)
        folder = Path(fresh.name)
    return folder
