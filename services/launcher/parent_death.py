"""A child of `tandem serve` must not outlive it, not even when the launcher is killed and can do nothing more.

The launcher names its process id in the child's environment; the child sees to the rest here, first thing.
"""

import ctypes
import os
import signal
import sys
import threading
import time

PARENT_VARIABLE = "TANDEM_LAUNCHER_PID"

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent() -> None:
    """End this process when the launcher that started it does. Does nothing where no launcher did."""
    named = os.environ.get(PARENT_VARIABLE, "")
    if not named.isdecimal():
        return
    launcher = int(named)
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    else:
        threading.Thread(target=_watch, args=(launcher,), name="parent-watch", daemon=True).start()
    if os.getppid() != launcher:  # it died before we could ask to be told
        print("tandem: the launcher of this process is gone, so it ends too", file=sys.stderr)
        os._exit(1)


def _watch(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)
