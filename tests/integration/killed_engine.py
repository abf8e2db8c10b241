"""A real model's streams through the death of their engine, beside the same streams undisturbed."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from process_fleet import ProcessFleet, wait_until
from streamed_answer import StreamedAnswer, stream


def model_fleet(folder: Path, model: Path, **engine: object) -> ProcessFleet:
    """A frontend and two engines that run the model itself, in float32 unless `engine` says otherwise."""
    fleet = ProcessFleet(
        folder,
        model,
        num_frontends=1,
        num_engines=2,
        # float32: whether two nearly equal logits change places must not depend on the batch in this test.
        engine={"executor": "torch", "dtype": "float32", "kv_cache_memory": 0.3, "threads": 1, **engine},
        # A busy machine is no dead engine.
        frontend={"heartbeat_timeout": 10},
    )
    for engine in fleet.engines:
        del engine.settings["num_kv_blocks"]
    return fleet


async def stream_through_a_kill(
    fleet: ProcessFleet, requests: Sequence[tuple[str, dict[str, Any]]], num_tokens: int
) -> tuple[list[StreamedAnswer], list[StreamedAnswer]]:
    """Of requests, each a path and a body: the undisturbed answers, then those whose first engine was killed after more
    than `num_tokens` of its tokens."""
    port = fleet.frontends[0].port
    undisturbed = await asyncio.gather(*(stream(port, body, path) for path, body in requests))
    engine = fleet.engines[0]
    before = engine.metric("generated_tokens_total")
    answers = asyncio.gather(*(stream(port, body, path) for path, body in requests))
    await asyncio.to_thread(
        wait_until,
        lambda: engine.metric("generated_tokens_total") > before + num_tokens and engine.metric("requests_running") > 0,
        "it is in the middle of its streams",
    )
    engine.kill()
    return undisturbed, await answers
