"""What is compiled is taken from a folder that is this user's alone, or from none."""

from pathlib import Path

import pytest

from shared.cache_folder import own_cache_folder


@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_nothing_is_taken_from_a_folder_that_others_may_write_to(
    mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "tandem" / "kernels"
    folder.mkdir(parents=True)
    folder.chmod(mode)
    assert own_cache_folder("kernels") is None
    assert "chmod 700" in caplog.text
    folder.chmod(0o755)
    assert own_cache_folder("kernels") == folder
    monkeypatch.setattr("os.geteuid", lambda: folder.stat().st_uid + 1)
    assert own_cache_folder("kernels") is None


def test_it_is_made_for_this_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = own_cache_folder("benchmarks")
    assert folder == tmp_path / "tandem" / "benchmarks"
    assert folder.stat().st_mode & 0o777 == 0o700
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert own_cache_folder("benchmarks") is None
