"""What the engine counts, for metrics and for its load. Written by the loop's thread, read by any."""

from collections import deque
from dataclasses import dataclass, field

RATE_WINDOW_SECONDS = 5.0


@dataclass(slots=True)
class StepTimes:
    """Where the last step's time went, in seconds."""

    schedule: float = 0.0
    execute: float = 0.0
    bookkeeping: float = 0.0


@dataclass(slots=True)
class Statistics:
    """Totals since the start. `finished` counts requests by finish reason."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    last_step: StepTimes = field(default_factory=StepTimes)


class TokenRate:
    """Tokens per second over the last few seconds, from one total, sampled at most ten times a second."""

    def __init__(self, window: float = RATE_WINDOW_SECONDS) -> None:
        self._window = window
        self._samples: deque[tuple[float, int]] = deque()

    def update(self, now: float, total: int) -> float:
        """Take the total as it is at `now` (seconds of a monotonic clock), and return the rate."""
        samples = self._samples
        if not samples or now - samples[-1][0] >= 0.1:
            samples.append((now, total))
            while len(samples) > 2 and samples[1][0] <= now - self._window:
                samples.popleft()
        then, total_then = samples[0]
        # A burst that has just begun is not extrapolated from its first milliseconds.
        return (total - total_then) / max(now - then, 1.0)
