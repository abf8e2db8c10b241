"""Without a compiler, or with a read-only home, the engine still runs; and it takes no more threads than its quota."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.engine.model import cpu_threads, kernels
from shared import cpu_cores


@pytest.fixture(autouse=True)
def fresh_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    kernels.load_kernels.cache_clear()
    yield
    kernels.load_kernels.cache_clear()


@pytest.mark.parametrize("compiler", ["no-such-compiler", "false"])
def test_without_a_compiler_there_are_none_and_the_log_says_what_to_do(
    compiler: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CC", compiler)
    with caplog.at_level(logging.WARNING):
        assert kernels.load_kernels() is None
    assert "Install a C compiler" in caplog.text


def test_a_second_process_finds_the_library_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    if kernels.load_kernels() is None:
        pytest.skip("no C compiler here")
    libraries = list((tmp_path / "tandem" / "kernels").iterdir())
    assert len(libraries) == 1
    made = libraries[0].stat().st_mtime_ns
    kernels.load_kernels.cache_clear()
    assert kernels.load_kernels() is not None
    assert [library.stat().st_mtime_ns for library in (tmp_path / "tandem" / "kernels").iterdir()] == [made]


def test_a_home_that_cannot_be_written_to_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    if kernels.load_kernels() is None:
        pytest.skip("no C compiler here")

    assert not list(tmp_path.glob("tandem-kernels-*"))  # loaded, it is no longer needed


def test_a_library_that_was_cut_short_is_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kernels, "_compile", lambda compiler, library: library.write_bytes(b""))
    assert kernels.load_kernels() is None
    (library,) = (tmp_path / "tandem" / "kernels").iterdir()
    assert library.stat().st_size == 0
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kernels.load_kernels.cache_clear()
    if kernels.load_kernels() is None:
        pytest.skip("no C compiler here")
    assert library.stat().st_size > 0


def test_a_compiler_that_takes_too_long_is_as_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    slow = tmp_path / "slow-cc"
    slow.write_text("#!/bin/sh\n[ $1 = --version ] && exec echo slow 1.0\necho still compiling >&2\nexec sleep 30\n")
    slow.chmod(0o755)
    monkeypatch.setenv("CC", str(slow))
    monkeypatch.setattr(kernels, "_COMPILE_SECONDS", 0.5)
    assert kernels.load_kernels() is None
    assert "still compiling" in caplog.text


def test_the_compiler_may_come_with_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if kernels.load_kernels() is None:
        pytest.skip("no C compiler here")
    kernels.load_kernels.cache_clear()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", "cc -g0")
    assert kernels.load_kernels() is not None


@pytest.mark.parametrize(
    ("quota", "cores"), [("max 100000", 8), ("250000 100000", 2), ("50000 100000", 1), ("1600000 100000", 8), ("", 8)]
)
def test_a_containers_quota_limits_the_threads(
    quota: str, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpu.max").write_text(quota)
    monkeypatch.setattr(cpu_cores, "_CGROUP_V2", tmp_path / "cpu.max")
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)), raising=False)
    assert cpu_threads.usable_threads() == cores


def test_without_control_groups_the_affinity_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_cores, "_CGROUP_V2", tmp_path / "none")
    monkeypatch.setattr(cpu_cores, "_CGROUP_V1", (tmp_path / "none", tmp_path / "none"))
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1, 2}, raising=False)
    assert cpu_threads.usable_threads() == 3


def test_the_environment_has_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert cpu_threads.usable_threads() == 3
