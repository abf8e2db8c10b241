"""Compiles the C programs of the benchmarks at their first use, into a folder of this user's own."""

import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path


class NoCompiler(RuntimeError):
    """There is no C compiler on this machine."""


@functools.cache
def compiled(source: Path, *flags: str) -> Path:
    """What the compiler makes of one file. Raises NoCompiler."""
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
    if compiler is None:
        raise NoCompiler(f"{source.name} is compiled at its first use, and there is no cc: install gcc")
    digest = hashlib.sha256(repr((flags, source.read_bytes())).encode()).hexdigest()[:16]
    target = Path(tempfile.gettempdir()) / f"tandem-benchmarks-{os.getuid()}" / f"{source.stem}-{digest}"
    if not target.exists():
        target.parent.mkdir(mode=0o700, exist_ok=True)
        temporary = target.with_suffix(f".{os.getpid()}")
        subprocess.run([compiler, *flags, "-o", str(temporary), str(source)], check=True)
        temporary.replace(target)
    return target
