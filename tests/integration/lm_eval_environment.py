"""lm-eval in a virtual environment of its own, in ~/.cache/tandem: it wants older libraries than the ones here."""

import shutil
import subprocess
import venv
from pathlib import Path

from filelock import FileLock

from services.launcher.smollm2 import default_cache

REQUIREMENTS = ("lm-eval[api]==0.4.13", "transformers==5.24.0")


class NoLmEval(RuntimeError):
    """lm-eval could not be installed; the message has pip's."""


def lm_eval_python() -> Path:
    """The interpreter of an environment that has lm-eval, made on first use (about a minute). Raises NoLmEval."""
    folder = default_cache() / REQUIREMENTS[0].replace("[api]==", "-")
    python, whole = folder / "bin" / "python", folder / ".installed"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f".{folder.name}.lock")):
        if not whole.exists():
            shutil.rmtree(folder, ignore_errors=True)
            venv.create(folder, with_pip=True)
            command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *REQUIREMENTS]
            done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
            if done.returncode:
                raise NoLmEval(f"`pip install {' '.join(REQUIREMENTS)}` failed: {done.stderr.strip()[-2000:]}")
            whole.touch()
    return python
