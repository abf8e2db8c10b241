"""How much memory this process may still have: the machine's, and no more than its container's limit leaves."""

from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_CGROUP_V2 = Path("/sys/fs/cgroup")
_CGROUP_V1 = Path("/sys/fs/cgroup/memory")


def available_memory() -> int | None:
    """Bytes that can be had without swapping. None: this system does not tell."""
    known = [room for room in (_of_machine(), _of_control_group()) if room is not None]
    return max(0, min(known)) if known else None


def _of_machine() -> int | None:
    try:
        fields = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, ValueError, KeyError, IndexError):
        return None


def _of_control_group() -> int | None:
    """What the limit leaves. Pages of files count as taken, and are given up before the limit is enforced."""
    try:
        if (_CGROUP_V2 / "memory.current").is_file():
            limit, used, statistics = "memory.max", "memory.current", "memory.stat"
            folder, files = _CGROUP_V2, ("inactive_file", "active_file")
        else:
            limit, used, statistics = "memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat"
            folder, files = _CGROUP_V1, ("total_inactive_file", "total_active_file")
        fields = dict(line.split() for line in (folder / statistics).read_text().splitlines())
        given_up = sum(int(fields.get(name, 0)) for name in files)
        return int((folder / limit).read_text()) - int((folder / used).read_text()) + given_up
    except (OSError, ValueError):
        return None  # no control group, or none with a limit ("max")
