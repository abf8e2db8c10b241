"""What `make bench` makes of its parts' numbers."""

import contextlib
import json
import subprocess
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import pytest

from loadtest import bench
from loadtest.bench import compare
from loadtest.bench_aims import AIMS, Aim, as_table, serve_aims
from loadtest.bench_document import frontend_plot, write_block
from loadtest.bench_parts import PARTS, serve_ratios
from loadtest.bench_serve import Cell
from loadtest.bench_serve import as_table as serve_table
from loadtest.serve_contenders import parse_peer

CELLS = [
    Cell("short", 8, "Tandem", 600.0, 80.0, 90.0, 9.0, 12.0, [600.0]),
    Cell("short", 8, "peer", 300.0, 160.0, 170.0, 20.0, 24.0, [300.0]),
    Cell("short", 8, "transformers", 200.0, None, None, None, None, [200.0]),
]


def serve_result() -> dict[str, Any]:
    memory = {"weights_mb": 100, "kv_cache_mb": 300, "peak_mb": 500, "torch_mb": 200}
    return {"cells": [asdict(cell) for cell in CELLS], "engine_memory": memory}


def test_servers_are_compared_with_tandem_alone() -> None:
    assert [line.split("|")[5].strip() for line in serve_table(CELLS).splitlines()[2:]] == ["1.00", "2.00", "3.00"]
    assert serve_ratios(serve_result()) == {
        "serve, short prompts at 8: rate over peer": 2.0,
        "serve, short prompts at 8: rate over transformers": 3.0,
        "engine: weights and KV cache over the most memory taken": 0.8,
    }


def test_aims_are_of_peers_that_stream() -> None:
    aims = {aim.what: aim for aim in serve_aims(serve_result())}
    assert [(aim.measured, aim.reached) for aim in aims.values()] == [(2.0, True), (0.5, True), (1.25, True)]
    assert not any("transformers" in what for what in aims)
    missed = as_table([Aim("rate", 1.2, 1.5, " times", at_least=True), Aim("start", 4.25, 10, " s")])
    assert [line.split("|")[-2].strip() for line in missed.splitlines()[2:]] == ["**missed**", "reached"]


@pytest.mark.parametrize("argument", ["http://127.0.0.1:9301", "vLLM", "vLLM=127.0.0.1:9301", "=http://127.0.0.1:9301"])
def test_a_peer_has_a_name_and_an_address(argument: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="NAME=http://HOST:PORT"):
        parse_peer(argument)
    with pytest.raises(SystemExit):
        bench.main(["--peer", argument])
    assert "NAME=http://HOST:PORT" in capsys.readouterr().err


def test_what_fell_is_named() -> None:
    table, fallen = compare({"kept": 0.9, "fell": 0.84, "new": 3.0}, {"kept": 1.0, "fell": 1.0, "gone": 1.0})
    assert fallen == ["fell"]
    assert [line for line in table.splitlines() if "\033[31m" in line] == [
        "\033[31m     0.84      1.00     -16%  fell\033[0m"
    ]


def test_a_table_takes_its_place_in_the_document(tmp_path: Path) -> None:
    document = tmp_path / "performance.md"
    document.write_text("Before\n<!-- bench fleet -->\nold\n<!-- end -->\nAfter\n")
    write_block(document, "fleet", "| new |")
    write_block(document, "fleet", "| newer |")
    assert document.read_text() == "Before\n<!-- bench fleet -->\n\n| newer |\n\n<!-- end -->\nAfter\n"
    # A peer that this run did not measure is not lost.
    with_peer = "| n | server |\n|---|---|\n| 1 | **Tandem** |\n| 1 | peer |"
    assert write_block(document, "fleet", with_peer) == set()
    assert write_block(document, "fleet", with_peer[: with_peer.rindex("\n")]) == {"peer"}
    assert with_peer in document.read_text()
    with pytest.raises(ValueError, match="one is expected"):
        write_block(document, "other", "")


def test_the_document_has_a_place_for_each_part() -> None:
    text = bench.DOCUMENT.read_text(encoding="utf-8")
    assert {name: text.count(f"<!-- bench {name} -->") for name in (*PARTS, "aims")} == dict.fromkeys(
        (*PARTS, "aims"), 1
    )
    assert set(AIMS) <= set(PARTS)


def test_a_plot_has_a_line_for_each_number_of_engines() -> None:
    cells = [
        {"engines": engines, "streams": streams, "frontend_cpu_us": 10.0 * engines}
        for engines in (1, 2)
        for streams in (64, 256)
    ]
    plot = frontend_plot({"cells": cells})
    assert 'x-axis "streams" [64, 256]' in plot
    assert [line.strip() for line in plot.splitlines() if "line [" in line] == [
        "line [10.0, 10.0]",
        "line [20.0, 20.0]",
    ]


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the parts are to find, in a record and a document of the test's own. Those that are missing fail."""
    results: dict[str, Any] = {}

    def run_part(name: str, flags: object) -> tuple[Any, str]:
        if name not in results:
            raise subprocess.CalledProcessError(1, name)
        return results[name], "| the table |"

    document = tmp_path / "performance.md"
    document.write_text("".join(f"<!-- bench {name} -->\n<!-- end -->\n" for name in (*PARTS, "aims")))
    monkeypatch.setattr(bench, "run_part", run_part)
    monkeypatch.setattr(bench, "RECORD", tmp_path / "bench.json")
    monkeypatch.setattr(bench, "DOCUMENT", document)
    monkeypatch.setattr(bench, "last_committed", bench.on_record)
    return results


def test_a_part_that_fails_takes_nothing_from_the_others(
    measured: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    measured["stream_path"] = {"8": 2.0, "512": 2.5}
    measured["start"] = {"ready": 4.0, "first": 5.0, "theirs": 3.0}
    assert bench.main(["--only", "start", "structured", "stream_path"]) == 1
    assert "FAILED: structured failed" in capsys.readouterr().out
    record = json.loads(bench.RECORD.read_text())
    assert {name: part["ratios"] for name, part in record["parts"].items()} == {
        "start": {"start: first token of transformers' generate over the server's": 0.6},
        "stream_path": {"frontend: a token among 8 streams over one among 512": 0.8},
    }
    text = bench.DOCUMENT.read_text()
    assert text.count("| the table |") == 2
    assert "| from `tandem serve` to the first token | at most 10 s | 5.00 s | reached |" in text
    # What a later run of one part measures is added.
    measured["start"]["first"] = 12.0
    assert bench.main(["--only", "start"]) == 0
    record = json.loads(bench.RECORD.read_text())
    assert [list(part["ratios"].values()) for part in record["parts"].values()] == [[0.25], [0.8]]
    assert "| at most 10 s | 12.0 s | **missed** |" in bench.DOCUMENT.read_text()


def test_a_table_with_a_peer_stays_with_its_record(measured: dict[str, Any]) -> None:
    measured["serve"] = serve_result()
    bench.DOCUMENT.write_text(
        bench.DOCUMENT.read_text().replace(
            "<!-- bench serve -->\n", "<!-- bench serve -->\n" + serve_table(CELLS) + "\n"
        )
    )
    # run_part's table has no peer in it.
    assert bench.main(["--only", "serve"]) == 0
    assert serve_table(CELLS) in bench.DOCUMENT.read_text()
    assert not bench.RECORD.exists()


def test_the_short_form_fails_under_a_floor_and_writes_nothing(
    measured: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    measured["stream_path"] = {"8": 2.0, "512": 2.5}
    assert bench.main(["--short", "--only", "stream_path"]) == 0
    measured["stream_path"]["512"] = 50.0
    assert bench.main(["--short", "--only", "stream_path"]) == 1
    assert "FAILED: frontend: a token among 8 streams over one among 512: 0.04" in capsys.readouterr().out
    assert not bench.RECORD.exists()
    assert "the table" not in bench.DOCUMENT.read_text()


def wait_for_end(pid: int) -> None:
    deadline = time.monotonic() + 60
    with contextlib.suppress(psutil.NoSuchProcess):
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.mark.parametrize("ignores", ["", "trap '' INT; "])
def test_a_part_that_takes_too_long_leaves_nothing_running(
    ignores: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "PATIENCE_SECONDS", 0.1 if ignores else 60)
    pid_file = tmp_path / "pid"
    # The one in the background ignores Ctrl-C, as sh has it; its output is not the part's, which would wait for it.
    script = f"{ignores}sleep 600 >/dev/null & echo $! > {pid_file}; sleep 600"
    seconds = 0.2
    while not pid_file.exists() or not pid_file.read_text().endswith("\n"):
        with pytest.raises(subprocess.TimeoutExpired):
            bench.run_bounded(["sh", "-c", script], seconds)
        seconds *= 2
    wait_for_end(int(pid_file.read_text()))


def test_a_part_that_ends_leaves_nothing_running_either(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    script = f"sleep 600 >/dev/null & echo $! > {pid_file}; echo a table"
    assert bench.run_bounded(["sh", "-c", script], 60) == "a table\n"
    wait_for_end(int(pid_file.read_text()))
    with pytest.raises(subprocess.CalledProcessError):
        bench.run_bounded(["false"], 60)
