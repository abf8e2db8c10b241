"""What an engine's process takes of memory, beside what it must: weights, KV cache, and PyTorch itself."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

MB = 1e6


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Resident megabytes. `torch_mb` is a process that has done nothing but import PyTorch."""

    peak_mb: float
    weights_mb: float
    kv_cache_mb: float
    torch_mb: float

    @property
    def ratio(self) -> float:
        """The peak over weights and KV cache."""
        return self.peak_mb / (self.weights_mb + self.kv_cache_mb)


def measure_engine_memory(pid: int, model: Path, kv_cache_gib: float) -> EngineMemory:
    """Of the engine's process `pid` so far, which serves `model` with a KV cache of that size. Linux only."""
    alone = subprocess.run(
        [sys.executable, "-c", "import torch; print(open('/proc/self/status').read())"],
        capture_output=True,
        text=True,
        check=True,
    )
    return EngineMemory(
        peak_mb=_peak_mb(Path(f"/proc/{pid}/status").read_text(encoding="utf-8")),
        weights_mb=sum(path.stat().st_size for path in model.glob("*.safetensors")) / MB,
        kv_cache_mb=kv_cache_gib * 2**30 / MB,
        torch_mb=_peak_mb(alone.stdout),
    )


def _peak_mb(status: str) -> float:
    """VmHWM of a /proc/PID/status.

    >>> _peak_mb("Name:\\tpython\\nVmHWM:\\t    2000 kB\\n")
    2.048
    """
    line = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024 / MB
