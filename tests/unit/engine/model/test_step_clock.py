"""The sampler's share of a step, on a CPU and as a GPU's events tell it."""

import time

import pytest
import torch

from services.engine.executor import step_clock
from services.engine.executor.step_clock import StepClock


class Hands:
    """A clock that the test turns."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(step_clock.time, "perf_counter", lambda: self.now)


def test_on_a_cpu_the_sampler_has_the_time_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    hands = Hands(monkeypatch)
    clock = StepClock(torch.device("cpu"))
    clock.forward_begins()
    hands.now += 5
    clock.sampling_begins()
    hands.now += 2
    clock.sampling_ends()
    hands.now += 1
    assert clock.sample_seconds() == 2
    clock.forward_begins()
    assert clock.sample_seconds() == 0, "a step in which nothing was sampled"


@pytest.mark.parametrize(("done", "expected"), [(True, 1.5), (False, 7.0)])
def test_on_a_gpu_the_model_has_the_time_between_its_events(
    monkeypatch: pytest.MonkeyPatch, done: bool, expected: float
) -> None:
    hands = Hands(monkeypatch)

    class Event:
        """The host launches at once; the model takes 5.5 s, for which the host waits inside the sampler."""

        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            pass

        def query(self) -> bool:
            return done

        def elapsed_time(self, other: "Event") -> float:
            return 5500.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    clock = StepClock(torch.device("cuda"))
    clock.forward_begins()
    clock.sampling_begins()
    hands.now += 7
    clock.sampling_ends()
    assert clock.sample_seconds() == expected


def test_the_real_clock_is_one_that_only_goes_forward() -> None:
    clock = StepClock(torch.device("cpu"))
    clock.forward_begins()
    clock.sampling_begins()
    until = time.perf_counter() + 0.002
    while time.perf_counter() < until:
        pass
    clock.sampling_ends()
    assert 0.002 <= clock.sample_seconds() < 10
