"""The benchmarks run programs that this user compiled, and none that somebody else has put in their place."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadtest import compiled as module
from loadtest.compiled import compiled

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler here")


@pytest.fixture(autouse=True)
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = tmp_path / "answer.c"
    source.write_text("int main(void) { return 42; }")
    _forget()
    yield source
    _forget()


def _forget() -> None:
    compiled.cache_clear()
    module._folder.cache_clear()


def test_a_program_is_compiled_once(source: Path, tmp_path: Path) -> None:
    program = compiled(source)
    assert subprocess.run([program]).returncode == 42
    assert program.parent == tmp_path / "cache" / "tandem" / "benchmarks"
    made = program.stat().st_mtime_ns
    _forget()
    assert compiled(source) == program
    assert program.stat().st_mtime_ns == made


def test_a_planted_program_is_not_run(source: Path) -> None:
    planted = compiled(source)
    planted.write_text("#!/bin/sh\nexit 1\n")
    planted.parent.chmod(0o777)
    _forget()
    program = compiled(source)
    assert program.parent != planted.parent
    assert program.parent.stat().st_mode & 0o777 == 0o700
    assert subprocess.run([program]).returncode == 42
