"""What the benchmark of the event loop's lag says of the machine that it ran on."""

import os
import subprocess
import sys

from loadtest.bench_aims import loop_lag_aims
from loadtest.bench_loop_lag import Cell, as_table
from loadtest.simulated_fleet import core_wait_seconds
from loadtest.stream_load import nicely


def cell(**changed: object) -> Cell:
    lags = {"0.001": 90.0, "0.0025": 7.0, "0.005": 3.0, "0.01": 0.0, "+Inf": 0.0}
    fields: dict[str, object] = {
        "what": "8000 tokens, 4",
        "clients": 4,
        "prompts": 90.4,
        "prompt_median_ms": 70.2,
        "lags": lags,
        "late": 0.0,
        "within_ms": 5.0,
        "stream_tokens": 39.84,
        "no_core": 0.0463,
    }
    return Cell(**{**fields, **changed})  # pyright: ignore[reportArgumentType]


def test_the_table_has_the_lags_the_streams_and_the_wait_for_a_core() -> None:
    header, _, row, other = as_table([cell(), cell(no_core=None)]).splitlines()
    assert header.endswith("| over 5 ms | a stream's tok/s | no core ms/s |")
    assert row == "| 8000 tokens, 4 | 4 | 90 | 70 | 90 | 7 | 3 | 0 | 0 | 0.0% | 39.8 | 46 |"
    assert other.endswith("| 39.8 | – |")


def test_one_late_look_misses_the_aim() -> None:
    results = [{"within_ms": 5.0}, {"within_ms": 2.5}]
    assert [aim.reached for aim in loop_lag_aims(results)] == [True]
    assert [aim.reached for aim in loop_lag_aims([*results, {"within_ms": 10.0}])] == [False]


def test_a_nice_command_is_nicer_than_this_process() -> None:
    show = [sys.executable, "-c", "import os; print(os.nice(0))"]
    niceness = [int(subprocess.check_output([*nicely(extra), *show])) for extra in (0, 2)]
    assert niceness == [os.nice(0), min(19, os.nice(0) + 2)]


def test_the_wait_for_a_core_grows_or_is_not_known() -> None:
    first, second = core_wait_seconds(os.getpid()), core_wait_seconds(os.getpid())
    if first is None:
        assert second is None
    else:
        assert second is not None
        assert 0 <= first <= second
