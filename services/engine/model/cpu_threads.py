"""How many threads the model may use on a CPU."""

import os

from shared.cpu_cores import usable_cores


def usable_threads() -> int:
    """OMP_NUM_THREADS where it is set; else the cores that this process may use."""
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    return int(wanted) if wanted.isdigit() and int(wanted) > 0 else usable_cores()
