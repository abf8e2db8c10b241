"""Large memory straight from the system: zeros that take room only as they are written, in huge pages where there are.

A C library's allocator hands out what the process has freed before it asks the system: used memory, small pages.
"""

import contextlib
import mmap


def fresh_pages(num_bytes: int) -> mmap.mmap:
    """Zeros, aligned to a page. Lives as long as something refers to it."""
    # Not shared, as mmap's default is: shared memory has no huge pages on most systems.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, max(num_bytes, 1), flags=flags)
    with contextlib.suppress(AttributeError, OSError, ValueError):  # not every system has them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
