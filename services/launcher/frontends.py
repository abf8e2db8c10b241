"""Several frontend processes behind one listening socket, for `tandem serve` and for `tandem frontend --workers`.

Each has its own links to the engines. Their metrics add up in a folder that all of them write to and any of them reads
(prometheus_client's multiprocess mode).
"""

import sys
from collections.abc import Mapping
from pathlib import Path

from services.launcher.supervisor import Child

HANG_TIMEOUT = 60.0  # seconds
METRICS_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"


def frontend_children(
    environment: Mapping[str, str], count: int, listen_fd: int, grace: float, scratch: Path
) -> list[Child]:
    """`count` frontends with this environment that serve the inherited socket `listen_fd`; `grace` in seconds, from
    SIGTERM to SIGKILL. Their ready files and metrics go to `scratch`."""
    metrics = scratch / "metrics"
    metrics.mkdir()
    children = []
    for index in range(count):
        ready_file = scratch / f"frontend-{index}.json"
        own = {
            "TANDEM_LISTEN_FD": str(listen_fd),
            "TANDEM_READY_FILE": str(ready_file),
            "TANDEM_WORKERS": "1",
        }
        if count > 1:
            own[METRICS_VARIABLE] = str(metrics)
        command = [sys.executable, "-m", "services.command", "frontend"]
        children.append(
            Child(
                f"frontend {index}",
                command,
                {**environment, **own},
                ready_file,
                grace,
                pass_fds=(listen_fd,),
                on_end=lambda pid: forget_gauges(metrics, pid),
                hang_timeout=HANG_TIMEOUT,
            )
        )
    return children


def forget_gauges(metrics: Path, pid: int) -> None:
    """What a process that is gone had in flight is in flight no more; its counters stay."""
    for file in metrics.glob(f"gauge_live*_{pid}.db"):
        file.unlink(missing_ok=True)
