"""Which engine gets a request: one small policy each, chosen by the setting `routing`.

`dispatch` asks; a `connection` is the candidate. The default policy has a file of its own, `prefix_aware`.
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol, TypeVar

from services.frontend.engines.load import EngineLoad
from services.frontend.engines.prefix_index import PrefixIndex
from services.frontend.generation import Generation

# What a request that runs or waits has still ahead of it, counted in prompt tokens of the same cost.
TOKENS_PER_REQUEST = 256


class Candidate(Protocol):
    """What a policy may know of an engine."""

    @property
    def load(self) -> EngineLoad: ...
    @property
    def prefixes(self) -> PrefixIndex: ...
    @property
    def block_size(self) -> int: ...


AnyCandidate = TypeVar("AnyCandidate", bound=Candidate)


class RoutingPolicy(ABC):
    @abstractmethod
    def choose(self, candidates: Sequence[AnyCandidate], generation: Generation) -> AnyCandidate:
        """One of the candidates, of which there is at least one."""

    def sent(self, candidate: Candidate, generation: Generation, num_tokens: int) -> None:
        """The generation, of so many tokens by now, went to the candidate: its load says so before it reports."""
        candidate.load.sent(num_tokens)


class RoundRobin(RoutingPolicy):
    """One after the other."""

    def __init__(self) -> None:
        # Frontends that start together must not walk in step.
        self._next = random.randrange(1 << 16)

    def choose(self, candidates: Sequence[AnyCandidate], generation: Generation) -> AnyCandidate:
        self._next += 1
        return candidates[self._next % len(candidates)]


class LeastLoaded(RoutingPolicy):
    """The less loaded of two engines drawn at random (Mitzenmacher, The Power of Two Choices, 2001).

    Loads are a moment old, and every frontend sees the same ones: all of them going to the least loaded
    engine at once is what makes it the most loaded. Drawing two first avoids that, at almost no loss."""

    def choose(self, candidates: Sequence[AnyCandidate], generation: Generation) -> AnyCandidate:
        if len(candidates) == 1:
            return candidates[0]
        first, second = random.sample(candidates, 2)
        return first if queued_work(first) <= queued_work(second) else second


def queued_work(candidate: Candidate) -> int:
    """What the engine has ahead of it, in prompt tokens."""
    load = candidate.load
    return load.queued_tokens + TOKENS_PER_REQUEST * load.queued_requests
