"""Logits processors: what they are told, what they may change, and how their faults end."""

import itertools
from importlib.metadata import EntryPoint

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_reference import request
from torch import Tensor

from services.engine.request import Request
from services.engine.sampling import processors
from services.engine.sampling.processors import (
    BatchChanges,
    LogitsProcessorFault,
    ProcessorContext,
    load_logits_processors,
)
from services.engine.sampling.sampler import Sampler
from shared.sampling_params import SamplingParams

VOCAB = 40
CONTEXT = ProcessorContext(VOCAB, (2,), torch.device("cpu"))


class Tracker:
    """Keeps the batch's requests from the changes alone."""

    def __init__(self, context: ProcessorContext | None = None) -> None:
        self.rows: dict[int, Request] = {}
        self.calls = 0
        self.seen: list[list[int]] = []

    def on_batch(self, changes: BatchChanges) -> None:
        self.calls += 1
        if changes.fresh:
            self.rows = {}
        for row, key in changes.removed:
            assert self.rows.pop(row).key == key
        leaving = {old: self.rows.pop(old) for old, _ in changes.moved}
        for old, new in changes.moved:
            assert new not in self.rows
            self.rows[new] = leaving[old]
        for row, added in changes.added:
            assert row not in self.rows
            self.rows[row] = added

    def apply(self, logits: Tensor) -> Tensor:
        assert sorted(self.rows) == list(range(len(logits)))
        self.seen.append([self.rows[row].key.request_id for row in range(len(logits))])
        return logits


def make_sampler(*chain) -> Sampler:
    return Sampler(vocab_size=VOCAB, eos_token_ids=[2], device=torch.device("cpu"), processors=chain)


def greedy(number: int) -> Request:
    return request(number, [1], [], SamplingParams(temperature=0.0))


@given(st.lists(st.lists(st.integers(0, 6), unique=True, min_size=1), min_size=1, max_size=8))
@settings(deadline=None, max_examples=60)
def test_the_changes_alone_tell_which_request_each_row_is(steps: list[list[int]]) -> None:
    tracker = Tracker()
    sampler = make_sampler(tracker)
    requests = [greedy(number) for number in range(7)]
    for numbers in steps:
        batch = [requests[number] for number in numbers]
        for request_, result in zip(batch, sampler.sample(torch.zeros(len(batch), VOCAB), batch), strict=True):
            request_.token_ids.append(result.token_id or 0)
    assert tracker.seen == steps
    assert tracker.calls == 1 + sum(a != b for a, b in itertools.pairwise(steps))


def test_a_processor_changes_what_is_chosen_after_bias_and_before_truncation() -> None:
    class OnlyToken9(Tracker):
        def apply(self, logits: Tensor) -> Tensor:
            assert logits.dtype == torch.float32
            assert float(logits[0, 3]) == 50.0
            masked = torch.full_like(logits, -torch.inf)
            masked[:, 9] = logits[:, 9]
            return masked

    params = SamplingParams(seed=1, top_p=0.5, logit_bias={3: 50.0})
    sampled = make_sampler(OnlyToken9()).sample(
        torch.zeros(1, VOCAB, dtype=torch.bfloat16), [request(0, [1], [], params)]
    )
    assert sampled[0].token_id == 9


class Broken(Tracker):
    """Faults once, in the way that it is told to."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault

    def on_batch(self, changes: BatchChanges) -> None:
        super().on_batch(changes)
        if self.fault == "on_batch":
            self.fault = ""
            raise KeyError("row 3")

    def apply(self, logits: Tensor) -> Tensor:
        fault, self.fault = self.fault, ""
        super().apply(logits)
        if fault == "apply":
            raise RuntimeError("out of cheese")
        if fault == "nothing":
            return None  # type: ignore[return-value]
        return {"shape": logits[:, :-1], "dtype": logits.double()}.get(fault, logits)


@pytest.mark.parametrize("fault", ["on_batch", "apply", "nothing", "shape", "dtype"])
def test_a_fault_ends_the_steps_requests_by_name_and_the_next_step_starts_afresh(fault, caplog) -> None:
    broken, after = Broken(fault), Tracker()
    sampler = make_sampler(broken, after)
    requests = [greedy(0), greedy(1)]
    sampled = sampler.sample(torch.zeros(2, VOCAB), requests)
    assert all("logits processor Broken" in (result.error or "") for result in sampled)
    assert "a logits processor failed" in caplog.text
    others = [greedy(2), requests[1]]
    assert [result.error for result in sampler.sample(torch.zeros(2, VOCAB), others)] == [None, None]
    assert broken.seen[-1] == after.seen[-1] == [2, 1]


def install(monkeypatch: pytest.MonkeyPatch, **values: str) -> None:
    points = [EntryPoint(name, value, processors.ENTRY_POINT_GROUP) for name, value in values.items()]
    monkeypatch.setattr(processors, "entry_points", lambda group: points if group == "tandem.logits_processors" else [])


def test_processors_are_loaded_by_entry_point_in_the_order_of_their_names(monkeypatch) -> None:
    install(monkeypatch, second=f"{__name__}:Tracker", first=f"{__name__}:Tracker")
    loaded = load_logits_processors(CONTEXT)
    assert [type(processor).__name__ for processor in loaded] == ["Tracker", "Tracker"]
    install(monkeypatch)
    assert load_logits_processors(CONTEXT) == []


def explode(context: ProcessorContext) -> None:
    raise ValueError("no licence")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("no_such_module:Thing", "No module named 'no_such_module'"),
        (f"{__name__}:Missing", "Missing"),
        (f"{__name__}:explode", "no licence"),
        (f"{__name__}:make_dictionary", "lacks on_batch or apply"),
    ],
)
def test_a_processor_that_cannot_be_loaded_stops_the_start_with_its_name(value, message, monkeypatch) -> None:
    install(monkeypatch, mine=value)
    with pytest.raises(LogitsProcessorFault, match=message) as caught:
        load_logits_processors(CONTEXT)
    assert "'mine'" in str(caught.value)


def make_dictionary(context: ProcessorContext) -> dict[str, int]:
    return {}
