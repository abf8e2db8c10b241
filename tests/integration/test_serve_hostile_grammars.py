"""Grammars that are made to be slow are refused soon, and other streams keep their rate meanwhile."""

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from streamed_answer import StreamedAnswer, stream

from loadtest.server_process import ServerProcess, tandem_serve

STREAMS = 8
TOKENS = 150


def nested(depth: int) -> dict[str, Any]:
    deep: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        deep = {"type": "object", "properties": {"a": deep}}
    return deep


def hostile(number: int) -> list[dict[str, Any]]:
    """No two the same: what was judged once is remembered."""
    return [
        {"guided_json": {**nested(90), "title": str(number)}},
        {"guided_json": {"type": "integer", "multipleOf": 999_983 + number}},
        {"guided_json": {"enum": [f"{number}-{i}" for i in range(100_000)]}},
        {"guided_json": {"properties": {f"p{number}-{i}": {"type": "integer"} for i in range(3000)}}},
        {"guided_regex": "(" * 5000 + str(number) + ")" * 5000},
        {"guided_regex": f"(?={number})b"},
        {"guided_grammar": "start: " + "(" * 5000 + f'"{number}"' + ")" * 5000},
        {"structured_outputs": {"choice": ["x" * 1_000_000 + str(number)]}},
    ]


@pytest.fixture(scope="module")
def server(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    flags = ["--model", str(smollm2), "--served-model-name", "m", "--executor", "simulated"]
    flags += ["--simulated-step-ms", "20"]
    with tandem_serve(tmp_path_factory.mktemp("hostile"), *flags) as server:
        yield server


async def streams(port: int) -> tuple[float, list[StreamedAnswer]]:
    """All of them at once, and the seconds that they took."""
    began = time.monotonic()
    bodies = [{"prompt": f"stream {number}", "max_tokens": TOKENS, "seed": number} for number in range(STREAMS)]
    answers = await asyncio.gather(*(stream(port, body) for body in bodies))
    return time.monotonic() - began, answers


def test_hostile_grammars_are_refused_while_streams_keep_their_rate(server: ServerProcess) -> None:
    refused: list[tuple[int, float, dict[str, Any]]] = []

    async def attack(stop: Callable[[], bool]) -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            number = 0
            while not stop() or not number:
                number += 1
                for fields in hostile(number):
                    began = time.monotonic()
                    answer = await client.post("/v1/completions", json={"model": "m", "prompt": "a", **fields})
                    refused.append((answer.status_code, time.monotonic() - began, fields))

    async def main() -> tuple[float, float]:
        await streams(server.port)
        alone, expected = await streams(server.port)
        ended = False
        attacking = asyncio.create_task(attack(lambda: ended))
        beside, answers = await streams(server.port)
        ended = True
        await attacking
        for answer, undisturbed in zip(answers, expected, strict=True):
            assert answer.complete, answer.describe()
            assert answer.text == undisturbed.text
        return alone, beside

    alone, beside = asyncio.run(main())
    assert len(refused) >= 8
    for status, _, fields in refused:
        assert status == 400, str(fields)[:200]
    seconds = sorted(seconds for _, seconds, _ in refused)
    print(
        f"streams: {alone:.2f} s alone, {beside:.2f} s beside; {len(refused)} refusals, the slowest {seconds[-1]:.2f} s"
    )
    assert seconds[len(seconds) // 2] < 1.0 + alone  # a machine that is busy is so for both
    assert beside < 2 * alone + 1.0
