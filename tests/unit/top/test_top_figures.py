"""Rates and quantiles of two looks."""

import math

import pytest
from prometheus_client import CollectorRegistry, Histogram

from services.top.figures import EACH_TOKEN, FIRST_TOKEN, REQUESTS, figures, quantile
from services.top.main import History
from services.top.reading import Engine, Labels, Reading


def labels(**values: str) -> Labels:
    return frozenset(values.items())


def reading(at: float, statuses: dict[str, float] | None = None, **metrics: float) -> Reading:
    requests = {labels(route="/v1/completions", status=key): value for key, value in (statuses or {}).items()}
    requests[labels(route="/metrics", status="200")] = 1000 * at
    samples = {REQUESTS: requests} | {name: {labels(model="m"): value} for name, value in metrics.items()}
    return Reading(at, [], samples, [], 1)


def test_rates_by_status_leave_out_what_is_no_completion() -> None:
    earlier = reading(100, {"200": 50, "429": 1, "500": 2}, tandem_frontend_failovers_total=3)
    later = reading(
        110,
        {"200": 150, "429": 11, "503": 10, "500": 7, "499": 5},
        tandem_frontend_failovers_total=5,
        tandem_frontend_stream_errors_total=4,
        tandem_frontend_requests_in_flight=8,
        tandem_frontend_streams_in_flight=6,
    )
    seen = figures(earlier, later)
    assert (seen.seconds, seen.requests, seen.refused) == (10, 13, 2)
    assert seen.failed == pytest.approx(0.5 + 0.4)  # before the first byte, and after it
    assert seen.abandoned == pytest.approx(0.5)
    assert (seen.in_flight, seen.streaming, seen.failovers) == (8, 6, 2)
    assert math.isnan(seen.first_token.median)


def test_a_frontend_that_began_anew_counts_from_nought() -> None:
    seen = figures(reading(0, {"200": 500}), reading(10, {"200": 20}))
    assert seen.requests == 2


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 0.9, 0.99])
def test_a_quantile_is_in_the_bucket_of_the_true_one(share: float) -> None:
    values = [0.001 * i for i in range(1, 1001)]
    histogram = Histogram("h", "", buckets=[0.1, 0.2, 0.5, 2.0], registry=(registry := CollectorRegistry()))
    for value in values:
        histogram.observe(value)
    buckets = {
        sample.labels["le"]: sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == "h_bucket"
    }
    true = values[min(len(values) - 1, int(share * len(values)))]
    found = quantile(share, buckets)
    lower, upper = max(b for b in (0, 0.1, 0.2, 0.5) if b <= true), min(b for b in (0.1, 0.2, 0.5, 2.0) if b >= true)
    assert lower <= found <= upper


def test_quantiles_of_nothing_and_of_what_is_past_the_last_bound() -> None:
    assert math.isnan(quantile(0.5, {}))
    assert math.isnan(quantile(0.5, {"1.0": 0, "+Inf": 0}))
    assert quantile(0.5, {"1.0": 0, "2.0": 0, "+Inf": 4}) == 2.0


def test_latencies_are_of_the_window_alone() -> None:
    def at(time: float, fast: float, slow: float) -> Reading:
        buckets = {labels(le="0.1", model="m"): fast, labels(le="1.0", model="m"): fast + slow}
        buckets[labels(le="+Inf", model="m")] = fast + slow
        return Reading(time, [], {f"{name}_bucket": buckets for name in (FIRST_TOKEN, EACH_TOKEN)}, [], 1)

    seen = figures(at(0, 1000, 0), at(10, 1000, 100))
    assert 0.1 < seen.first_token.median < seen.first_token.p99 <= 1.0
    assert seen.each_token == seen.first_token


def test_the_window_keeps_one_look_that_is_older_and_forgets_when_other_frontends_answer() -> None:
    history = History(window=10)
    for at in range(0, 60, 2):
        history.add(Reading(at, [Engine("m", "a", "ready", tokens_per_second=at)], {}, [], 1))
    assert history.figures() is not None
    assert history.readings[-1].at - history.readings[0].at == 10
    assert history.tokens_per_second[-1] == 58
    history.add(Reading(60, [], {}, [], 2))
    assert history.figures() is None
