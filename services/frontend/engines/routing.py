"""Which engine gets a request: one small policy each, chosen by the setting `routing`.

`dispatch` asks; a `connection` is the candidate. A policy sees the whole request, so that one may weigh what
an engine's cache already holds of it.
"""

import random
from collections.abc import Sequence
from typing import Literal, Protocol, TypeVar

from services.frontend.engines.load import EngineLoad
from services.frontend.generation import Generation

# What a request that runs or waits has still ahead of it, counted in prompt tokens of the same cost.
TOKENS_PER_REQUEST = 256


class Candidate(Protocol):
    """What a policy may know of an engine."""

    @property
    def load(self) -> EngineLoad: ...


AnyCandidate = TypeVar("AnyCandidate", bound=Candidate)


class RoutingPolicy(Protocol):
    def choose(self, candidates: Sequence[AnyCandidate], generation: Generation) -> AnyCandidate:
        """One of the candidates, of which there is at least one. Its cost must not grow with their number."""
        ...


class RoundRobin:
    """One after the other."""

    def __init__(self) -> None:
        # Frontends that start together must not walk in step.
        self._next = random.randrange(1 << 16)

    def choose(self, candidates: Sequence[AnyCandidate], generation: Generation) -> AnyCandidate:
        self._next += 1
        return candidates[self._next % len(candidates)]


class LeastLoaded:
    """The less loaded of two engines drawn at random (Mitzenmacher, The Power of Two Choices, 2001).

    Loads are a moment old, and every frontend sees the same ones: all of them going to the least loaded
    engine at once is what makes it the most loaded. Drawing two first avoids that, at almost no loss."""

    def choose(self, candidates: Sequence[AnyCandidate], generation: Generation) -> AnyCandidate:
        if len(candidates) == 1:
            return candidates[0]
        first, second = random.sample(candidates, 2)
        return first if _load(first) <= _load(second) else second


def _load(candidate: Candidate) -> int:
    load = candidate.load
    return load.queued_tokens + TOKENS_PER_REQUEST * load.queued_requests


def routing_policy(name: Literal["round_robin", "least_loaded"]) -> RoutingPolicy:
    """The policy of that name."""
    return RoundRobin() if name == "round_robin" else LeastLoaded()
