"""The cheap histogram counts as Prometheus' own does, and both of Prometheus' formats carry it."""

import bisect

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from shared.metrics import Distribution, Metric, exposition, family

OPENMETRICS = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
BOUNDS = (0.1, 1.0, 10.0)
SECONDS = Metric("some_seconds", "histogram", "Times.", ("phase",), BOUNDS)


@given(st.lists(st.one_of(st.sampled_from(BOUNDS), st.floats(0, 100))))
def test_a_distribution_counts_as_prometheus_does(values: list[float]) -> None:
    registry = CollectorRegistry()
    theirs = Histogram("some_seconds", "Times.", ["phase"], registry=registry, buckets=BOUNDS).labels("x")
    ours = SECONDS.distribution()
    for value in values:
        theirs.observe(value)
        ours.observe(value)
    (expected,) = registry.collect()
    shown = family(SECONDS, {("x",): ours})
    assert {(s.name, tuple(s.labels.items())): s.value for s in shown.samples} == {
        (s.name, tuple(s.labels.items())): s.value for s in expected.samples if not s.name.endswith("_created")
    }
    assert ours.count == len(values)


def test_both_formats_say_the_same_and_openmetrics_alone_has_exemplars() -> None:
    seconds = SECONDS.distribution()
    seconds.observe(0.05)
    seconds.observe_traced(5.0, "0af7651916cd43dd8448eb211c80319c", 1.5e9)
    families = [
        family(SECONDS, {("run",): seconds}),
        family(Metric("things_total", "counter", "Things."), {(): 3}),
        family(Metric("level_ratio", "gauge", "A level.", ("model",)), {("a",): 0.25, ("b",): 1}),
        family(Metric("some_info", "gauge", "What runs.", ("version",)), {('1 "quoted"\n',): 1}),
        family(Metric("unused_total", "counter", "Nothing yet.", ("reason",)), {}),
    ]
    body, content_type = exposition(families, "*/*")
    assert content_type.startswith("text/plain")
    plain = {s.name + str(s.labels): s for f in text_string_to_metric_families(body.decode()) for s in f.samples}
    body, content_type = exposition(families, OPENMETRICS)
    assert content_type.startswith("application/openmetrics-text")
    parsed = list(openmetrics.text_string_to_metric_families(body.decode()))
    assert [f.name for f in parsed] == ["some_seconds", "things", "level_ratio", "some_info", "unused"]
    rich = {s.name + str(s.labels): s for f in parsed for s in f.samples}
    assert {key: s.value for key, s in rich.items()} == {key: s.value for key, s in plain.items()}
    exemplars = {s.labels["le"]: s.exemplar for s in rich.values() if s.exemplar}
    assert list(exemplars) == ["10.0"]
    exemplar = exemplars["10.0"]
    assert exemplar is not None
    assert (exemplar.labels, exemplar.value) == ({"trace_id": "0af7651916cd43dd8448eb211c80319c"}, 5.0)


@pytest.mark.parametrize("value", [0.0, 0.1, 0.10001, 10.0, 11.0])
def test_an_exemplar_is_kept_in_its_own_bucket(value: float) -> None:
    distribution = Distribution(BOUNDS)
    distribution.observe_traced(value, "t", 1.0)
    found = [bucket for bucket in range(4) if distribution.exemplar(bucket)]
    assert found == [bisect.bisect_left(BOUNDS, value)]
    assert distribution.counts()[found[0]] == 1
