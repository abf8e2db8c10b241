"""What one model's engines and links counted since the start, for metrics."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from services.frontend.metrics.catalogue import DETOKENIZE_SECONDS
from shared.metrics import Distribution

# Why an engine was lost, or no longer used.
Loss = Literal["disconnected", "silent", "blocked", "malformed", "restarted", "refused", "removed"]


@dataclass(slots=True)
class LinkCounts:
    """What went over the links of one pool.."""

    messages_in: int = 0
    messages_out: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    reconnects: int = 0
    malformed: int = 0
    stale_outputs: int = 0


@dataclass(slots=True)
class DispatchCounts:
    """Requests, and what became of them."""

    requests: int = 0
    failovers: int = 0  # attempts after an engine died under a request
    handovers: int = 0  # attempts after a draining engine gave a request back
    overloads: int = 0  # an engine refused a request for want of room
    given_up: int = 0  # ended with an error of this side
    handshake_failures: int = 0  # an engine was reached, and no link came of it
    failover_reasons: Counter[Loss] = field(default_factory=Counter)
    link: LinkCounts = field(default_factory=LinkCounts)
    output_seconds: Distribution = field(default_factory=DETOKENIZE_SECONDS.distribution)
