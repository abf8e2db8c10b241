"""A short form of the frontend's benchmarks: ratios of CPU times of one run, within bounds that a busy machine keeps.

They leave them when the cost of a token begins to grow with the number of streams, or a task switch a token comes back.
"""

import contextlib
from dataclasses import asdict
from pathlib import Path

import pytest
import uvloop

from loadtest import bench_stream_path
from loadtest.bench import compare, serve_ratios, write_block
from loadtest.bench_serve import Cell, table
from loadtest.bench_stream_cost import PACES, Server, constant_server, run
from loadtest.serve_contenders import parse_peer
from loadtest.simulated_fleet import running_fleet
from loadtest.stream_load import NoCompiler, stream_load
from services.frontend.tokenizer import Tokenizer


def test_a_token_costs_the_same_among_few_streams_and_many(smollm2: Path) -> None:
    tokenizer = Tokenizer.load(smollm2)
    few, many = (uvloop.run(bench_stream_path.measure(tokenizer, streams, 16_000 // streams)) for streams in (8, 400))
    assert many < 6 * few  # 1.3 on an idle machine, 2.5 on one whose caches others use too


def test_a_chunk_costs_little_more_than_sending_a_constant_one(smollm2: Path, tmp_path: Path) -> None:
    try:
        stream_load()
    except NoCompiler as error:
        pytest.skip(str(error))
    with contextlib.ExitStack() as running:
        fleet = running.enter_context(running_fleet(smollm2, tmp_path, 1, PACES["paced"]))
        constant = running.enter_context(constant_server("constant", "fastapi", "paced"))
        frontend = Server("frontend", "paced", fleet.port, fleet.frontend)
        for server in (frontend, constant):
            run(server, 32, 32)
        costs = {server.name: min(run(server, 32, 32).chunk_us for _ in range(2)) for server in (frontend, constant)}
    assert costs["frontend"] < 4 * costs["constant"], costs  # 1.4 on an idle machine


def test_servers_are_compared_with_tandem_alone() -> None:
    cells = [
        Cell("short", 8, "Tandem", 600.0, 80.0, 90.0, 9.0, 12.0, [600.0]),
        Cell("short", 8, "peer", 300.0, 160.0, 170.0, 20.0, 24.0, [300.0]),
        Cell("short", 8, "transformers", 200.0, None, None, None, None, [200.0]),
    ]
    assert [line.split("|")[5].strip() for line in table(cells).splitlines()[2:]] == ["1.0", "2.0", "3.0"]
    memory = {"weights_mb": 100, "kv_cache_mb": 300, "peak_mb": 500, "torch_mb": 200}
    assert serve_ratios({"cells": [asdict(cell) for cell in cells], "engine_memory": memory}) == {
        "serve, short prompts at 8: rate over transformers'": 3.0,
        "engine: weights and KV cache over the most memory taken": 0.8,
    }


@pytest.mark.parametrize("argument", ["http://127.0.0.1:9301", "vLLM", "vLLM=127.0.0.1:9301", "=http://127.0.0.1:9301"])
def test_a_peer_has_a_name_and_an_address(argument: str) -> None:
    with pytest.raises(ValueError, match="NAME=http://HOST:PORT"):
        parse_peer(argument)


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
