"""How much memory this process may still have: the machine's, and no more than limits of its control groups leave."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_OWN_GROUPS = Path("/proc/self/cgroup")


@dataclass(frozen=True, slots=True)
class _Version:
    """Where a version of control groups lies, and its files' names."""

    root: Path
    limits: tuple[str, ...]  # from "high" on, processes are slowed down
    used: str
    files_given_up: str  # of memory.stat: pages of files that nobody has used lately


_VERSIONS = (
    _Version(Path("/sys/fs/cgroup"), ("memory.max", "memory.high"), "memory.current", "inactive_file"),
    _Version(Path("/sys/fs/cgroup/memory"), ("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"),
)


def available_memory() -> int | None:
    """Bytes that can be had without swapping. None: this system does not tell."""
    rooms = [*_of_machine(), *_of_control_groups()]
    return max(0, min(rooms)) if rooms else None


def _of_machine() -> Iterator[int]:
    try:
        fields = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
        yield int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, ValueError, KeyError, IndexError):
        pass


def _of_control_groups() -> Iterator[int]:
    """What the limits of the process's groups leave, and of the groups that those are in."""
    try:
        paths = {line.split(":", 2)[2].strip("/") for line in _OWN_GROUPS.read_text().splitlines()}
    except (OSError, IndexError):
        paths = set[str]()
    for version in _VERSIONS:
        # A container may see its own group as the root.
        groups = {version.root}
        for path in paths:
            group = version.root / path
            groups |= {group, *(parent for parent in group.parents if parent.is_relative_to(version.root))}
        for group in groups:
            yield from _of_group(group, version)


def _of_group(group: Path, version: _Version) -> Iterator[int]:
    try:
        statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        used = int((group / version.used).read_text()) - int(statistics.get(version.files_given_up, 0))
    except (OSError, ValueError):
        return
    for name in version.limits:
        with contextlib.suppress(OSError, ValueError):  # "max"
            yield int((group / name).read_text()) - used
