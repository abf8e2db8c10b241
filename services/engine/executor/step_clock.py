"""Tells the sampler's share of a step from the model's, for the metrics."""

import time

import torch


class StepClock:
    """On a CPU, a clock read before and after. A GPU's host runs ahead and waits for the model inside the sampler:
    there, two events in the GPU's stream tell how long the model took. Nothing is ever waited for."""

    def __init__(self, device: torch.device) -> None:
        self._began = 0.0
        self._sample_seconds = 0.0
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        if device.type == "cuda":
            self._events = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def forward_begins(self) -> None:
        self._sample_seconds = 0.0
        self._began = time.perf_counter()
        if self._events is not None:
            self._events[0].record()

    def sampling_begins(self) -> None:
        if self._events is None:
            self._began = time.perf_counter()
        else:
            self._events[1].record()

    def sampling_ends(self) -> None:
        """The tokens are on the host, so that the model's work is done."""
        seconds = time.perf_counter() - self._began
        if self._events is not None and self._events[1].query():
            seconds -= self._events[0].elapsed_time(self._events[1]) / 1000
        self._sample_seconds = max(0.0, seconds)

    def sample_seconds(self) -> float:
        """Of the step since `forward_begins`; 0 where nothing was sampled."""
        return self._sample_seconds
