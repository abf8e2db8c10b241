"""What is left of a machine's memory and of a container's, read from files as Linux writes them."""

from pathlib import Path

import pytest

from services.engine.model import available_memory as module
from services.engine.model.available_memory import available_memory

MIB = 1 << 20


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for the files; those that a test does not write are not there."""
    monkeypatch.setattr(module, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(module, "_CGROUP_V2", tmp_path)
    monkeypatch.setattr(module, "_CGROUP_V1", tmp_path / "memory")
    return tmp_path


def write_v2(folder: Path, limit: str, used: int, files: int) -> None:
    (folder / "memory.max").write_text(limit)
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {files // 2}\nactive_file {files - files // 2}\n")


def test_the_machine_tells(system: Path) -> None:
    (system / "meminfo").write_text("MemTotal: 2000 kB\nMemFree: 10 kB\nMemAvailable:    1000 kB\nHugePages_Total: 0\n")
    assert available_memory() == 1000 * 1024


def test_a_containers_limit_counts_where_it_is_less(system: Path) -> None:
    (system / "meminfo").write_text(f"MemAvailable: {300 * 1024} kB\n")
    write_v2(system, f"{200 * MIB}\n", used=150 * MIB, files=30 * MIB)
    assert available_memory() == 80 * MIB
    write_v2(system, f"{900 * MIB}\n", used=150 * MIB, files=0)
    assert available_memory() == 300 * MIB
    write_v2(system, "max\n", used=150 * MIB, files=0)
    assert available_memory() == 300 * MIB


def test_a_limit_that_is_passed_leaves_nothing(system: Path) -> None:
    write_v2(system, f"{100 * MIB}\n", used=101 * MIB, files=0)
    assert available_memory() == 0


def test_older_control_groups_tell_it_in_other_files(system: Path) -> None:
    folder = system / "memory"
    folder.mkdir()
    (folder / "memory.limit_in_bytes").write_text(f"{100 * MIB}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{70 * MIB}\n")
    (folder / "memory.stat").write_text(f"cache 1\ntotal_inactive_file {4 * MIB}\ntotal_active_file {6 * MIB}\n")
    assert available_memory() == 40 * MIB


@pytest.mark.parametrize("content", ["", "MemAvailable:\n", "MemAvailable: many kB\n", "no colon\n"])
def test_a_system_that_does_not_tell(content: str, system: Path) -> None:
    assert available_memory() is None
    (system / "meminfo").write_text(content)
    assert available_memory() is None
