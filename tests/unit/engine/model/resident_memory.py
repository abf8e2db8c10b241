"""How much of a tensor's memory the kernel has really given: asked page by page, whatever else the process does."""

import ctypes
import mmap

from torch import Tensor

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]


def resident_bytes(tensor: Tensor) -> int:
    """Bytes of the whole pages inside `tensor` that are in memory."""
    page = mmap.PAGESIZE
    start = -(-tensor.data_ptr() // page) * page
    pages = (tensor.data_ptr() + tensor.nbytes - start) // page
    states = ctypes.create_string_buffer(pages)
    if _libc.mincore(start, pages * page, states):
        raise OSError(ctypes.get_errno(), "mincore cannot say which pages are in memory")
    return sum(state & 1 for state in states.raw) * page
