"""An engine whose every token says when it was made: bench_frontend's clients see how long it was on its way.

    python -m loadtest.stamping_engine FILE      FILE: token ids, a JSON list; TANDEM_… variables as for an engine

Token i of the list is made in the i-th millisecond of the machine's monotonic clock, modulo the list's length. Steps
end as far apart as `simulated_step_ms` says, whatever the engine has to do between them.
"""

import json
import sys
import time
from pathlib import Path
from typing import ClassVar

from services.engine.executor import simulated
from services.engine.executor.simulated import SimulatedExecutor
from services.engine.main import run
from services.engine.request import Request, SampledToken, Step
from services.engine.settings import EngineSettings
from services.launcher.parent_death import end_with_parent


class StampingExecutor(SimulatedExecutor):
    """Every token of a step is the one that names the moment at which the step ended."""

    token_ids: ClassVar[list[int]] = []

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(settings, self._wait)
        self._pace = (settings.simulated_step_ms or 0) / 1000
        self._due = 0.0

    def _wait(self, seconds: float) -> None:
        """A step that comes too late is made good by the next, and no more than one."""
        now = time.monotonic()
        self._due = max(self._due + self._pace, now - self._pace)
        time.sleep(max(0.0, self._due - now))

    def execute(self, step: Step) -> list[SampledToken]:
        sampled = super().execute(step)
        token_id = self.token_ids[int(time.monotonic() * 1000) % len(self.token_ids)]
        for each in sampled:
            if each.token_id is not None:
                each.token_id = token_id
        return sampled

    def _next_random(self, request: Request) -> int:
        return 0  # replaced above; what it costs to draw a token is no part of this benchmark


def main(file: Path) -> int:
    end_with_parent()
    StampingExecutor.token_ids = json.loads(file.read_text())
    simulated.SimulatedExecutor = StampingExecutor
    return run(EngineSettings())  # pyright: ignore[reportCallIssue]


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
