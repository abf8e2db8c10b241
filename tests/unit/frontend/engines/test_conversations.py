"""Conversations whose history grows, on real engine cores: what the prefix cache saves under each policy, and that
a frontend's index is the engine's cache, whatever happens to the connection."""

import random
from pathlib import Path
from typing import Any

import pytest
from core_engine import CoreEngine
from engine_fleet import Fleet, RecordingSink, run
from engine_harness import write_model

NUM_CONVERSATIONS = 20
NUM_ENGINES = 4
NUM_TURNS = 5
ENGINE: dict[str, Any] = {"block_size": 16, "max_num_seqs": 16, "max_num_batched_tokens": 2048}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", vocab_size=50_000, max_position_embeddings=32_768, eos_token_id=1)


def core_fleet(model: Path, num_engines: int, **settings: Any) -> Fleet:
    fleet = Fleet(num_engines, **settings)
    for address in fleet.addresses:
        fleet.transport.kill(address)
        fleet.transport.run(address, CoreEngine(model, num_kv_blocks=850, **ENGINE))
    return fleet


async def share_of_reusable_tokens_cached(fleet: Fleet) -> float:
    """Every turn, all conversations at once and in an order of its own; a turn adds some 300 tokens."""
    randomness = random.Random(5)
    histories = [[randomness.randrange(2, 50_000) for _ in range(1200)] for _ in range(NUM_CONVERSATIONS)]
    reusable = cached = 0
    await fleet.start()
    for turn in range(NUM_TURNS):
        sinks: dict[int, RecordingSink] = {}
        for number in randomness.sample(range(NUM_CONVERSATIONS), NUM_CONVERSATIONS):
            _, sinks[number] = fleet.submit(histories[number], max_tokens=64, seed=number, ignore_eos=True)
        await fleet.run_to_the_end(steps=500)
        fleet.assert_clean()
        for number, sink in sinks.items():
            history = histories[number]
            if turn:
                # All but this turn's question was computed a turn ago, on some engine.
                reusable += len(history) - 240
                cached += next(o.cached_tokens for o in sink.outputs if o.cached_tokens is not None) or 0
            histories[number] = history + sink.token_ids + [randomness.randrange(2, 50_000) for _ in range(240)]
    return cached / reusable


def test_prefix_aware_routing_finds_the_history_of_conversations_and_round_robin_a_quarter_of_it(model: Path) -> None:
    """An engine's cache holds its share of the conversations and some more, but not all of them."""
    shares: dict[str, float] = {}

    async def main(routing: str) -> None:
        shares[routing] = await share_of_reusable_tokens_cached(core_fleet(model, NUM_ENGINES, routing=routing))

    for routing in ("prefix_aware", "least_loaded", "round_robin"):
        run(lambda routing=routing: main(routing))
    print(
        "reusable prompt tokens that were cached: " + ", ".join(f"{name} {share:.1%}" for name, share in shares.items())
    )
    assert shares["prefix_aware"] >= 0.9
    assert 0.2 <= shares["round_robin"] <= 0.35


def test_the_index_is_the_engines_cache_after_lost_connections_and_restarts(model: Path) -> None:
    async def main() -> None:
        fleet = core_fleet(model, 2, routing="prefix_aware")
        await fleet.start()
        randomness = random.Random(3)
        for round_number in range(12):
            for _ in range(12):
                fleet.submit([randomness.randrange(2, 50_000) for _ in range(randomness.randrange(10, 900))])
            await fleet.step()
            address = fleet.addresses[round_number % 2]
            if round_number % 3 == 0:
                fleet.transport.cut(address)
            elif round_number % 3 == 1:
                fleet.transport.kill(address)
                await fleet.settle()
                fleet.transport.run(address, CoreEngine(model, num_kv_blocks=850, **ENGINE))
            await fleet.run_to_the_end()
            await fleet.pass_time(1)
            for address, connection in fleet.pool.connections.items():
                engine = fleet.transport.engines[address]
                assert isinstance(engine, CoreEngine)
                assert connection.prefixes._held == set(engine.core.stored_block_hashes())
        fleet.assert_clean()

    run(main)
