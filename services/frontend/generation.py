"""What the HTTP side hands to the engines' side: one generation, and the sink that takes its tokens.

One choice of one HTTP request is one generation (n > 1 makes several). `engines/` carries it to an engine and,
should that one die, on to another; `output/` implements the sink.
"""

import itertools
import secrets
from dataclasses import dataclass, field
from typing import Protocol

from services.frontend.tracing import UNTRACED, GenerationTrace
from shared.protocol import RequestOutput
from shared.sampling_params import SamplingParams

# Ids are unique in this process; together with its boot id, in the fleet.
_counter = itertools.count(1)


def new_request_id() -> int:
    """The next id of this process for the link."""
    return next(_counter)


def new_seed() -> int:
    """A seed for a request whose client gave none: every request is then reproducible on another engine."""
    return secrets.randbits(63)


_REASONS = {400: "invalid", 429: "engines_full", 503: "no_engine", 504: "timeout"}


class GenerationError(Exception):
    """The generation cannot go on. `status` is the HTTP status where nothing was sent yet; `retry_after` in seconds;
    `reason` a word for the metrics."""

    def __init__(self, message: str, status: int = 500, retry_after: float | None = None, *, reason: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.retry_after = retry_after
        self.reason = reason or _REASONS.get(status, "failed")


class TokenSink(Protocol):
    """Takes one generation's tokens, on the event loop, in order, none of them twice."""

    def accept(self, output: RequestOutput) -> bool:
        """Take a step's output. True: this was the last (an engine's finish reason, or a stop string was found):
        the caller forgets the generation, and aborts it where the engine has not finished it."""
        ...

    def fail(self, error: GenerationError) -> None:
        """The generation ends here with an error; nothing more comes."""
        ...


@dataclass(slots=True, eq=False)
class Generation:
    """One choice on its way. `sampling.seed` is set. `model` is a name the frontend is configured with."""

    model: str
    prompt_token_ids: list[int]
    sampling: SamplingParams
    sink: TokenSink
    request_id: int = field(default_factory=new_request_id)
    priority: int = 0
    arrival_time: float = 0.0  # Unix seconds
    deadline: float | None = None  # Unix seconds
    cache_salt: str = ""
    trace: GenerationTrace = UNTRACED
    # For metrics, in seconds of time.perf_counter; 0 until then.
    first_output_at: float = 0.0
    finished_at: float = 0.0
