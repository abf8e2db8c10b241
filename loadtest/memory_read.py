"""Runs memory_read.c: how long this machine takes to read so many bytes of memory once, at best."""

import ctypes
import time
from pathlib import Path

from loadtest.compiled import compiled


class MemoryReader:
    """A piece of memory of `num_bytes`, read by `threads` threads. Raises NoCompiler."""

    def __init__(self, num_bytes: int, threads: int) -> None:
        source = Path(__file__).with_suffix(".c")
        library = ctypes.CDLL(str(compiled(source, "-O3", "-march=native", "-shared", "-fPIC", "-pthread")))
        library.read_memory.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
        library.read_memory.restype = ctypes.c_uint64
        self._read = library.read_memory
        self._data = bytearray(b"\1") * num_bytes  # written to, or all of its pages were the one of zeros
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._data))
        self._threads = threads

    def seconds(self) -> float:
        """Of one reading."""
        began = time.perf_counter()
        self._read(self._address, len(self._data), self._threads)
        return time.perf_counter() - began
