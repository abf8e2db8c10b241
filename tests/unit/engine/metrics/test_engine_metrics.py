"""What the engine counts of queue, prefix cache, batches and phases, and that a scrape shows all of the catalogue."""

from pathlib import Path

import pytest
from engine_harness import PEER, make_add, make_core, make_settings, run_to_end, write_model
from prometheus_client.parser import text_string_to_metric_families

from services.engine import metric_catalogue as catalogue
from services.engine.link import Link
from services.engine.mailbox import Inbox
from services.engine.metrics import EngineMetrics, Serving
from shared.metrics import PROCESS_METRICS
from shared.structured_output import StructuredOutput


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


def test_every_admission_is_a_look_into_the_prefix_cache(model: Path) -> None:
    core = make_core(model)
    counts = core.statistics
    prompt = list(range(10, 22))  # three blocks
    core.add(PEER, make_add(1, prompt, max_tokens=2))
    run_to_end(core)
    assert (counts.prefix_queried_tokens, counts.prefix_hit_tokens) == (12, 0)
    # The last token is always computed: two blocks are found.
    core.add(PEER, make_add(2, prompt, max_tokens=2))
    # A resumed request looks for what it had made, too.
    core.add(PEER, make_add(3, prompt, output=[30], max_tokens=3))
    run_to_end(core)
    assert (counts.prefix_queried_tokens, counts.prefix_hit_tokens) == (12 + 12 + 13, 8 + 12)
    assert (counts.prompt_tokens, counts.cached_tokens) == (36, 8 + 12)
    # Logprobs of the prompt need every position computed: nothing is looked for.
    core.add(PEER, make_add(4, prompt, max_tokens=1, prompt_logprobs=0))
    run_to_end(core)
    assert counts.prefix_queried_tokens == 37


def test_each_request_is_once_in_the_queue_and_each_step_in_every_histogram(model: Path) -> None:
    core = make_core(model, max_num_seqs=2, max_num_batched_tokens=8)
    for number in range(5):
        core.add(PEER, make_add(number, list(range(5, 16)), max_tokens=4))
    run_to_end(core)
    counts = core.statistics
    assert counts.received == 5
    assert counts.queue_seconds.count == counts.prefill_seconds.count == 5
    assert counts.batch_requests.count == counts.batch_tokens.count == counts.steps
    assert all(seconds.count == counts.steps for seconds in counts.phases.values())
    # Every token is computed but the last that each sampled, and what the prefix cache held.
    assert counts.batch_tokens.total == 5 * (11 + 4 - 1) - counts.prefix_hit_tokens
    assert counts.batch_requests.counts()[2:] == [0] * (len(counts.batch_requests.buckets) - 1)


def test_preempted_requests_look_again_but_waited_once(model: Path) -> None:
    core = make_core(model, num_kv_blocks=8, max_num_seqs=4)
    for number in range(4):
        core.add(PEER, make_add(number, list(range(8 * number + 5, 8 * number + 12)), max_tokens=12))
    run_to_end(core)
    counts = core.statistics
    assert counts.preemptions
    assert counts.queue_seconds.count == 4
    assert counts.prefix_queried_tokens > 4 * 7


def test_refusals_are_told_apart(model: Path) -> None:
    core = make_core(model, max_waiting_requests=1)
    core.add(PEER, make_add(1, [5]))
    core.add(PEER, make_add(2, [5]))
    core.add(PEER, make_add(3, [5000]))
    core.draining = True
    core.add(PEER, make_add(4, [5]))
    assert core.statistics.refused == {"overloaded": 1, "invalid": 1, "draining": 1}
    assert core.statistics.received == 4


def test_a_scrape_shows_the_whole_catalogue(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = make_settings(model)
    core = make_core(model)
    trouble: str | None = "loading"
    serving: Serving | None = None
    metrics = EngineMetrics(settings, lambda: serving, lambda: trouble)
    names = {metric.name.removesuffix("_total") for metric in catalogue.CATALOGUE}
    names |= {name.removesuffix("_total") for name in PROCESS_METRICS}

    def scrape() -> dict[str, dict[tuple[str, ...], float]]:
        text = metrics.exposition("")[0].decode()
        families = list(text_string_to_metric_families(text))
        assert {each.name for each in families} == names
        return {each.name: {tuple(s.labels.values()): s.value for s in each.samples} for each in families}

    assert scrape()["tandem_engine_ready"] == {(): 0.0}
    inbox = Inbox(1 << 20)
    link = Link(settings, core.description, core.limits, b"engine", inbox, lambda: True, lambda error: None)
    link.start(core.load())
    try:
        serving, trouble = Serving(core, link, inbox), None
        core.add(PEER, make_add(1, [5] * 9, max_tokens=2))
        core.step()
        waiting = StructuredOutput(kind="choice", value='["yes"]')
        monkeypatch.setattr(core.pending_grammars, "take_ready", list)  # as if it were still being made
        core.add(PEER, make_add(2, [5], structured_output=waiting))
        shown = scrape()
        assert shown["tandem_engine_ready"] == {(): 1.0}
        assert shown["tandem_engine_requests_running"] == {(): 1.0}
        assert shown["tandem_engine_requests_preparing"] == {(): 1.0}
        assert shown["tandem_engine_requests_waiting"] == {(): 0.0}
        assert shown["tandem_engine_kv_usage_ratio"] == {(): 3 / 64}
        assert shown["tandem_engine_kv_cache_info"] == {("4", "64"): 1.0}
        assert set(shown["tandem_engine_requests_finished"].values()) == {0.0}
        for metric in catalogue.CATALOGUE:
            values = shown[metric.name.removesuffix("_total")]
            assert all(len(labels) == len(metric.labels) for labels in values if metric.kind != "histogram"), metric
            assert values, f"no value of {metric.name}"
    finally:
        link.stop(0)
        assert link.join(10)
