"""A folder in the user's cache for what is compiled at its first use: the kernels, the programs of the benchmarks."""

import logging
import os
import stat
from pathlib import Path

logger = logging.getLogger(__name__)


def own_cache_folder(name: str) -> Path | None:
    """Made if need be. None where that cannot be (a read-only home, as containers have it), or where somebody else
    could put a program that this process would then run."""
    try:
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        folder = Path(base) / "tandem" / name
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        status = folder.stat()
        foreign = status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if foreign:
            logger.warning(
                "Others than this user may write to %s, so nothing compiled is taken from there, and all is compiled "
                "at every start. Make it this user's alone (chown, chmod 700) to change that.",
                folder,
            )
        elif os.access(folder, os.W_OK):
            return folder
    except (OSError, RuntimeError):  # RuntimeError: a user without a home
        pass
    return None
