"""How many cores this process may use: a container's quota counts, not the node's cores."""

import os
from pathlib import Path

_CGROUP_V2 = Path("/sys/fs/cgroup/cpu.max")
_CGROUP_V1 = (Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"), Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us"))


def usable_cores() -> int:
    """Its affinity, and no more than its control group's quota (rounded down, at least 1)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        if _CGROUP_V2.is_file():
            quota, period = _CGROUP_V2.read_text().split()
        else:
            quota, period = (path.read_text() for path in _CGROUP_V1)
        if quota.strip() not in ("max", "-1"):
            cores = min(cores, int(quota) // int(period))
    except (OSError, ValueError):
        pass  # no control group: the affinity is all there is to know
    return max(cores, 1)
