"""What `tandem serve` hands to its children, and to which."""

import json
from pathlib import Path

import pytest

from services.engine.settings import EngineSettings
from services.frontend.settings import FrontendSettings
from services.launcher.serve import _engines
from services.launcher.settings import ServeSettings, child_environment
from shared import cpu_cores


def test_a_child_gets_what_was_set_for_its_service_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_MAX_NUM_SEQS", "3")
    monkeypatch.setenv("TANDEM_READY_FILE", "/the/launchers/own")
    settings = ServeSettings(model="m", api_key=["a", "b"], trust_remote_code=True, port=1234)
    engine = child_environment(settings, EngineSettings, {"link_port": 7, "ready_file": "/its/own"})
    frontend = child_environment(settings, FrontendSettings, {"engine_addresses": ["h:7"], "ready_file": None})
    assert engine["TANDEM_MAX_NUM_SEQS"] == "3"
    assert engine["TANDEM_READY_FILE"] == "/its/own"
    assert "TANDEM_API_KEY" not in engine
    assert "TANDEM_MAX_NUM_SEQS" not in frontend
    assert "TANDEM_READY_FILE" not in frontend
    assert json.loads(frontend["TANDEM_API_KEY"]) == ["a", "b"]


@pytest.mark.parametrize(
    ("engines", "threads", "variable", "quota", "each"),
    [
        (1, None, None, "max 100000", 8),
        (3, None, None, "max 100000", 2),
        (2, None, None, "400000 100000", 2),  # a container's quota counts, not the node's cores
        (9, None, None, "max 100000", 1),
        (2, 5, None, "max 100000", 5),
        (2, None, "3", "max 100000", None),  # what the engines obey themselves
        (2, 5, "3", "max 100000", 5),
    ],
)
def test_the_engines_share_the_cores_that_this_process_may_use(
    engines: int,
    threads: int | None,
    variable: str | None,
    quota: str,
    each: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)), raising=False)
    (tmp_path / "cpu.max").write_text(quota)
    monkeypatch.setattr(cpu_cores, "_CGROUP_V2", tmp_path / "cpu.max")
    settings = ServeSettings(model="m", engines=engines, threads=threads)
    for child in _engines(settings, [7] * engines, [8] * engines, tmp_path):
        assert child.environment.get("TANDEM_THREADS") == (None if each is None else str(each))


def test_the_child_reads_back_what_was_set(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ServeSettings(
        model="a model, with a comma",
        reasoning_tags=("<a>", "</a>"),
        served_model_name=["x"],
        max_model_len=99,
        enable_prefix_caching=False,
        kv_cache_memory=0.5,
    )
    for service, overrides in ((EngineSettings, {"threads": 2}), (FrontendSettings, {"listen_fd": 5})):
        with monkeypatch.context() as patched:
            for name, value in child_environment(settings, service, overrides).items():
                patched.setenv(name, value)
            child = service()
        expected = settings.model_dump(include=settings.model_fields_set & service.model_fields.keys()) | overrides
        assert child.model_dump(include=set(expected)) == expected
        assert child.model_fields_set == set(expected)
