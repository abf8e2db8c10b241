"""What the engine counts, for metrics and for its load. Written by the loop's thread, read by any."""

from collections import deque
from dataclasses import dataclass, field

from services.engine import metric_catalogue as catalogue
from shared.metrics import Distribution

RATE_WINDOW_SECONDS = 5.0
PHASES = ("schedule", "forward", "sample", "output")


@dataclass(slots=True)
class StepTimes:
    """Where the last step's time went, in seconds."""

    schedule: float = 0.0
    execute: float = 0.0
    sample: float = 0.0  # of execute
    bookkeeping: float = 0.0


@dataclass(slots=True)
class Statistics:
    """Totals since the start. `finished` and `refused` count requests by reason."""

    received: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)
    last_step: StepTimes = field(default_factory=StepTimes)
    queue_seconds: Distribution = field(default_factory=catalogue.QUEUE_SECONDS.distribution)
    prefill_seconds: Distribution = field(default_factory=catalogue.PREFILL_SECONDS.distribution)
    batch_requests: Distribution = field(default_factory=catalogue.BATCH_REQUESTS.distribution)
    batch_tokens: Distribution = field(default_factory=catalogue.BATCH_TOKENS.distribution)
    phases: dict[str, Distribution] = field(
        default_factory=lambda: {phase: catalogue.STEP_PHASE_SECONDS.distribution() for phase in PHASES}
    )

    def refuse(self, reason: str) -> None:
        self.refused[reason] = self.refused.get(reason, 0) + 1

    def add_step(self, num_requests: int, num_tokens: int) -> None:
        """A step is over, and `last_step` is what it took."""
        self.steps += 1
        self.batch_requests.observe(num_requests)
        self.batch_tokens.observe(num_tokens)
        times, phases = self.last_step, self.phases
        phases["schedule"].observe(times.schedule)
        phases["forward"].observe(times.execute - times.sample)
        phases["sample"].observe(times.sample)
        phases["output"].observe(times.bookkeeping)


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
