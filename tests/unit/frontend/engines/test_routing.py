"""The routing policies by their shares, and the load that they weigh."""

import itertools
from collections import Counter
from dataclasses import dataclass, field

from services.frontend.engines.load import EngineLoad
from services.frontend.engines.policies import routing_policy
from services.frontend.engines.prefix_aware import PrefixAware
from services.frontend.engines.prefix_index import PrefixIndex
from services.frontend.engines.routing import LeastLoaded, RoundRobin
from services.frontend.generation import Generation, GenerationError
from services.frontend.settings import FrontendSettings
from shared.protocol import Load, RequestOutput
from shared.sampling_params import SamplingParams


class NoSink:
    def accept(self, output: RequestOutput) -> bool:
        return True

    def fail(self, error: GenerationError) -> None:
        raise error


GENERATION = Generation("model", [1] * 100, SamplingParams(), NoSink())


@dataclass(eq=False)
class Engine:
    name: int
    load: EngineLoad = field(default_factory=EngineLoad)
    prefixes: PrefixIndex = field(default_factory=PrefixIndex)
    block_size: int = 16


def test_prefix_aware_is_the_default() -> None:
    assert isinstance(routing_policy(FrontendSettings()), PrefixAware)


def test_round_robin_gives_each_engine_its_turn() -> None:
    engines = [Engine(name) for name in range(3)]
    policy = routing_policy(FrontendSettings(routing="round_robin"))
    assert isinstance(policy, RoundRobin)
    chosen = [policy.choose(engines, GENERATION).name for _ in range(9)]
    assert Counter(chosen) == {0: 3, 1: 3, 2: 3}
    assert all(a != b for a, b in itertools.pairwise(chosen))


def test_least_loaded_never_takes_the_most_loaded_of_two() -> None:
    busy, idle = Engine(0), Engine(1)
    busy.load.update(Load(running_requests=3, waiting_tokens=1000))
    policy = routing_policy(FrontendSettings(routing="least_loaded"))
    assert isinstance(policy, LeastLoaded)
    assert {policy.choose([busy, idle], GENERATION).name for _ in range(50)} == {1}
    assert policy.choose([busy], GENERATION) is busy


def test_what_was_sent_counts_before_the_engine_reports_it() -> None:
    engines = [Engine(name) for name in range(4)]
    policy = LeastLoaded()
    for _ in range(400):
        policy.choose(engines, GENERATION).load.sent(100)
    shares = [engine.load.queued_requests for engine in engines]
    assert sum(shares) == 400
    assert max(shares) - min(shares) <= 20


def test_a_report_that_cannot_have_counted_the_last_requests_does_not_erase_them() -> None:
    load = EngineLoad()
    load.sent(100)
    load.update(Load())
    assert (load.queued_requests, load.queued_tokens) == (1, 100)
    load.update(Load(running_requests=1))
    assert (load.queued_requests, load.queued_tokens) == (1, 0)


def test_many_frontends_with_one_stale_view_do_not_herd() -> None:
    # Each of 100 frontends sees the same loads and sends one request: the idlest must not get them all.
    policy = LeastLoaded()
    engines = [Engine(name) for name in range(10)]
    for engine in engines:
        engine.load.update(Load(running_requests=engine.name))
    shares = Counter(policy.choose(engines, GENERATION).name for _ in range(10_000))
    # The idlest is drawn in a fifth of all pairs, and wins those.
    assert 1700 <= shares[0] <= 2300
    assert shares[9] == 0
