"""The benchmarks in their short form: ratios within one run, over floors that a busy machine keeps.

They fall under them when the cost of a token begins to grow with the number of streams or the length of the context,
when a step does far more than read the weights, or when a task switch a token comes back.
"""

import shutil
from pathlib import Path

import pytest

from loadtest import bench


# Not those whose other side is the machine itself: how late an event loop is, how long a start takes.
@pytest.mark.parametrize(
    "part",
    ["serve", "engine_step", "engine_overhead", "structured", "sampler", "stream_cost", "stream_path"],
)
@pytest.mark.skipif(shutil.which("cc") is None, reason="the benchmarks' clients are compiled")
def test_ratios_keep_their_floors(
    part: str, smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "RESULTS", tmp_path)
    status = bench.main(["--short", "--only", part])
    captured = capfd.readouterr()
    assert status == 0, captured.out[-4000:] + captured.err[-4000:]
