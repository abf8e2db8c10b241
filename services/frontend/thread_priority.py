"""Has the event loop's thread run soon after it wakes, where there are fewer processors than threads with work.

`http/server.py` calls it. Beside two threads that encode long prompts on two cores, Linux otherwise lets the loop wait
behind one of them until its next tick: 4 ms at 250 ticks a second.
"""

import ctypes
import platform
import sys

# For how long at once the event loop asks to run: Linux then lets it go before threads that asked for longer, as all do
# that did not ask (0.7 to 2.8 ms). Its share of the processors is the same. A nicer value for the other threads would
# hold the loop up instead: it would wait for them to get a processor whenever they have Python's lock.
SLICE_NANOSECONDS = 300_000

# (sched_setattr, sched_getattr), for which the C library has no functions before glibc 2.41.
_SYSTEM_CALLS = {"x86_64": (314, 315), "aarch64": (274, 275), "riscv64": (274, 275)}
_SCHED_OTHER = 0
_RESET_ON_FORK = 1


class _Attributes(ctypes.Structure):
    """Linux's struct sched_attr, in its first version."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("policy", ctypes.c_uint32),
        ("flags", ctypes.c_uint64),
        ("nice", ctypes.c_int32),
        ("priority", ctypes.c_uint32),
        ("runtime", ctypes.c_uint64),
        ("deadline", ctypes.c_uint64),
        ("period", ctypes.c_uint64),
    )


def run_soon() -> bool:
    """Have the calling thread, and none that it starts, run soon after it wakes. False where the system cannot: other
    systems than Linux, Linux before 6.12, a sandbox."""
    attributes = _attributes()
    if attributes is None or attributes.policy != _SCHED_OTHER:
        return False  # whoever chose another policy has thought of that
    attributes.flags |= _RESET_ON_FORK
    attributes.runtime = SLICE_NANOSECONDS
    set_attributes, _ = _SYSTEM_CALLS[platform.machine()]
    if ctypes.CDLL(None).syscall(ctypes.c_long(set_attributes), 0, ctypes.byref(attributes), 0):
        return False
    return slice_nanoseconds() == SLICE_NANOSECONDS  # older kernels take it, and do nothing


def slice_nanoseconds(thread: int = 0) -> int:
    """For how long at once a thread runs where others want to, by its native id (0: the calling one); 0 where the
    system does not say."""
    attributes = _attributes(thread)
    return 0 if attributes is None else attributes.runtime


def _attributes(thread: int = 0) -> _Attributes | None:
    is_32_bit = sys.maxsize < 2**32  # where a 64-bit processor's system calls have other numbers
    if sys.platform != "linux" or is_32_bit or platform.machine() not in _SYSTEM_CALLS:
        return None
    attributes = _Attributes()
    size = ctypes.c_uint(ctypes.sizeof(attributes))
    _, get_attributes = _SYSTEM_CALLS[platform.machine()]
    failed = ctypes.CDLL(None).syscall(ctypes.c_long(get_attributes), thread, ctypes.byref(attributes), size, 0)
    return None if failed else attributes
