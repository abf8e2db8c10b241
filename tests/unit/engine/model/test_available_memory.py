"""What is left of a machine's memory and of its control groups', read from files as Linux writes them."""

from dataclasses import replace
from pathlib import Path

import pytest

from services.engine.model import available_memory as module
from services.engine.model.available_memory import available_memory

MIB = 1 << 20


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for the files; those that a test does not write are not there."""
    monkeypatch.setattr(module, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(module, "_OWN_GROUPS", tmp_path / "own")
    second, first = module._VERSIONS
    versions = (replace(second, root=tmp_path / "v2"), replace(first, root=tmp_path / "v1"))
    monkeypatch.setattr(module, "_VERSIONS", versions)
    (tmp_path / "meminfo").write_text(f"MemTotal: 900000 kB\nMemAvailable:   {300 * 1024} kB\nHugePages_Total: 0\n")
    return tmp_path


def write_v2(group: Path, limit: str, used: int, files: int = 0) -> None:
    group.mkdir(parents=True, exist_ok=True)
    (group / "memory.max").write_text(f"{limit}\n")
    (group / "memory.current").write_text(f"{used}\n")
    (group / "memory.stat").write_text(f"anon 5\ninactive_file {files}\nactive_file 7777777\n")


def test_the_machine_tells(system: Path) -> None:
    assert available_memory() == 300 * MIB


def test_a_limit_counts_where_it_leaves_less(system: Path) -> None:
    write_v2(system / "v2", str(200 * MIB), used=150 * MIB, files=30 * MIB)
    assert available_memory() == 80 * MIB
    write_v2(system / "v2", str(900 * MIB), used=150 * MIB)
    assert available_memory() == 300 * MIB
    write_v2(system / "v2", "max", used=150 * MIB)
    assert available_memory() == 300 * MIB


def test_the_least_of_a_group_and_those_that_it_is_in(system: Path) -> None:
    (system / "own").write_text("0::/jobs/42/step\n")
    write_v2(system / "v2" / "jobs" / "42" / "step", "max", used=MIB)
    write_v2(system / "v2" / "jobs" / "42", str(50 * MIB), used=20 * MIB)
    write_v2(system / "v2" / "jobs", str(90 * MIB), used=20 * MIB)
    write_v2(system / "v2" / "other", str(MIB), used=MIB)
    assert available_memory() == 30 * MIB


def test_from_memory_high_on_processes_are_slowed_down(system: Path) -> None:
    write_v2(system / "v2", str(200 * MIB), used=60 * MIB)
    (system / "v2" / "memory.high").write_text(f"{100 * MIB}\n")
    assert available_memory() == 40 * MIB
    (system / "v2" / "memory.high").write_text("max\n")
    assert available_memory() == 140 * MIB


def test_a_limit_that_is_passed_leaves_nothing(system: Path) -> None:
    write_v2(system / "v2", str(100 * MIB), used=101 * MIB)
    assert available_memory() == 0


@pytest.mark.parametrize("group", ["", "docker/4711"])
def test_older_control_groups_tell_it_in_other_files(group: str, system: Path) -> None:
    (system / "own").write_text("9:cpu,cpuacct:/elsewhere\n8:memory:/docker/4711\n")
    folder = system / "v1" / group
    folder.mkdir(parents=True)
    (folder / "memory.limit_in_bytes").write_text(f"{100 * MIB}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{70 * MIB}\n")
    (folder / "memory.stat").write_text(f"cache 1\ntotal_inactive_file {4 * MIB}\ntotal_active_file {6 * MIB}\n")
    assert available_memory() == 34 * MIB


@pytest.mark.parametrize("content", [None, "", "MemAvailable:\n", "MemAvailable: many kB\n", "no colon\n"])
def test_a_system_that_does_not_tell(content: str | None, system: Path) -> None:
    (system / "meminfo").unlink()
    if content is not None:
        (system / "meminfo").write_text(content)
    (system / "own").write_text("nonsense\n")
    assert available_memory() is None
