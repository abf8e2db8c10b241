"""Large memory straight from the system: zeros that take room only as they are written, in huge pages where there are.

A C library's allocator hands out what the process has freed before it asks the system: used memory, small pages.
"""

import contextlib
import ctypes
import errno
import functools
import mmap
import os
import sys
from collections.abc import Callable

POPULATE_WRITE = 23  # of madvise, in Linux 5.14 and later; Python's mmap has no name for it


def fresh_pages(num_bytes: int) -> mmap.mmap:
    """Zeros, aligned to a page. Lives as long as something refers to it."""
    # Not shared, as mmap's default is: shared memory has no huge pages on most systems.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, max(num_bytes, 1), flags=flags)
    with contextlib.suppress(AttributeError, OSError, ValueError):  # not every system has them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def populate(address: int, num_bytes: int) -> bool:
    """Have the system give these pages now, whatever they hold, and not when they are first written: a virtual
    machine's host may take milliseconds for each of them. False: this system can not.

    Raises OSError where the memory is not to be had.
    """
    madvise = _madvise()
    if madvise is None:
        return False
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    if madvise(start, address + num_bytes - start, POPULATE_WRITE) == 0:
        return True
    error = ctypes.get_errno()
    if error == errno.EINVAL:
        return False
    raise OSError(error, os.strerror(error))


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    if sys.platform != "linux":
        return None
    # Python's own holds the interpreter's lock meanwhile.
    function = ctypes.CDLL(None, use_errno=True).madvise
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int], ctypes.c_int
    return function
