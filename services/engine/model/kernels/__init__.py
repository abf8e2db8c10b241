"""Compiles the C kernels beside this file for this very machine at first use, and loads them.

The library goes to the user's cache, under a name that changes with the sources, the compiler and the processor;
where others could write there, to a folder of this process's own. Where there is no C compiler, callers take their
PyTorch implementations: slower, and never wrong.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch

from shared.cache_folder import own_cache_folder

logger = logging.getLogger(__name__)

MAX_HEAD_DIM = 256  # as in the sources
MAX_QUERY_GROUP = 64  # query heads of one KV head: MAX_HEADS in paged_attention.c
MAX_TEAM_THREADS = 256  # MAX_THREADS in team.h
DTYPE_SUFFIXES = {torch.bfloat16: "bf16", torch.float32: "f32"}

_FOLDER = Path(__file__).parent
# Where every operation is rounded for itself, the results are the same on every processor, and in PyTorch.
_EXACT = ("-ffp-contract=off",)
_SOURCES: dict[str, tuple[str, ...]] = {
    "decoder_ops.c": (),
    "decoder_step.c": (),
    "logits.c": (),
    "pack_linear.c": (),
    "paged_attention.c": (),
    "sample_tokens.c": _EXACT,
    "team.c": (),
    "token_logprobs.c": _EXACT,
    "token_mask.c": (),
}
_FLAGS = ("-O3", "-march=native", "-fopenmp", "-pthread", "-fPIC", "-fno-math-errno")
_COMPILE_SECONDS = 120


class Kernels:
    """The library, twice: `quick` keeps Python's interpreter lock (its calls take microseconds, and taking the
    lock again may take milliseconds while another thread is busy); `long` gives it away."""

    def __init__(self, path: Path) -> None:
        self.quick = ctypes.PyDLL(str(path))
        self.long = ctypes.CDLL(str(path))


@cache
def load_kernels() -> Kernels | None:
    """The kernels, compiled if need be (a few seconds, once); None where that is not possible."""
    try:
        # An empty value means what none does, as in make.
        compiler = shlex.split(os.environ.get("CC", "")) or ["cc"]
        name = _library_name(compiler)
        folder = own_cache_folder("kernels")
        if folder is not None:
            return _load_or_compile(compiler, folder / name)
        with tempfile.TemporaryDirectory(prefix="tandem-kernels-") as own:
            return _load_or_compile(compiler, Path(own) / name)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        reason = getattr(error, "stderr", None) or str(error)
        if isinstance(reason, bytes):  # a compiler that ran out of time leaves bytes, whatever was asked for
            reason = reason.decode(errors="replace")
        logger.warning(
            "The CPU kernels cannot be compiled, so slower PyTorch code runs instead. Install a C compiler (gcc) "
            "with OpenMP to change that. Reason: %s",
            reason.strip().split("\n")[0],
        )
        return None


def _library_name(compiler: list[str]) -> str:
    version = subprocess.run(
        [*compiler, "--version"], capture_output=True, text=True, check=True, timeout=_COMPILE_SECONDS
    ).stdout
    digest = hashlib.sha256(repr((compiler, version, _FLAGS, _SOURCES, str(_torch_openmp()), _processor())).encode())
    for path in sorted(_FOLDER.glob("*.[ch]")):
        digest.update(path.read_bytes())
    return f"kernels-{digest.hexdigest()[:16]}.so"


def _load_or_compile(compiler: list[str], library: Path) -> Kernels:
    if library.exists():
        try:
            return Kernels(library)
        except OSError as error:  # cut short by a full disk or a crash: made anew
            logger.warning("The compiled CPU kernels cannot be loaded and are compiled again: %s", error)
    _compile(compiler, library)
    return Kernels(library)


def _compile(compiler: list[str], library: Path) -> None:
    openmp = _torch_openmp()
    with tempfile.TemporaryDirectory(dir=library.parent) as build:
        objects = [str(Path(build) / f"{source}.o") for source in _SOURCES]
        # Linked against the OpenMP that PyTorch has loaded: a second one would bring a second set of threads, and
        # each set spins on the cores while it waits for the other.
        link = [
            *compiler,
            "-shared",
            *objects,
            "-o",
            f"{build}/{library.name}",
            *([str(openmp)] if openmp else ["-fopenmp"]),
            "-lm",
        ]
        commands = [
            [*compiler, *_FLAGS, *flags, "-c", str(_FOLDER / source), "-o", object_]
            for (source, flags), object_ in zip(_SOURCES.items(), objects, strict=True)
        ]
        for command in [*commands, link]:
            subprocess.run(command, capture_output=True, text=True, check=True, timeout=_COMPILE_SECONDS)
        # Atomic, so that engines that start together each find a whole file.
        os.replace(f"{build}/{library.name}", library)


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
