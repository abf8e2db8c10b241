"""Waits until nobody uses the processors, between two turns of a benchmark.

A server is not idle with its last answer: vLLM's worker, for one, goes on spinning on a core for a second, and would
take that core from whoever is measured next.
"""

import sys
import time

import psutil

IDLE_PERCENT = 5.0  # of all cores together
LOOK_SECONDS = 0.25
LOOKS = 3  # one after another
PATIENCE_SECONDS = 15.0


def wait_until_idle(patience: float = PATIENCE_SECONDS) -> None:
    """Returns once the machine has been idle for three quarters of a second; with a warning where it never is."""
    deadline = time.monotonic() + patience
    idle_looks, percent = 0, 0.0
    while idle_looks < LOOKS:
        if time.monotonic() > deadline:
            print(f"The machine does not become idle: {percent:.0f}% busy. What follows shares it.", file=sys.stderr)
            return
        percent = psutil.cpu_percent(interval=LOOK_SECONDS)
        idle_looks = idle_looks + 1 if percent < IDLE_PERCENT else 0
