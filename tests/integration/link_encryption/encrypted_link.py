"""What the tests of the encrypted link share: keys, and a frontend's pool at an engine's port."""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from services.engine.link import Link
from services.frontend.engines import EnginePool
from services.frontend.settings import EnginePoolSettings, FrontendSettings
from shared.link_keys import write_link_keys
from shared.protocol import ModelLimits

LIMITS = ModelLimits(100, 50, [2], 4, 9)

OpenEngine = Callable[..., Link]


def make_keys(folder: Path) -> Path:
    write_link_keys(folder)
    return folder


def close(link: Link) -> None:
    link.stop(linger=0.1)
    assert link.join(10)


def with_pool(port: int, keys: Path | None, body: Callable[[EnginePool], Coroutine[Any, Any, None]]) -> None:
    """Run `body` with a frontend's pool whose one engine is at `port`."""

    async def main() -> None:
        settings = FrontendSettings.model_validate({"link_keys": keys, "heartbeat_interval": 0.2})
        engines = EnginePoolSettings(engine_addresses=[f"127.0.0.1:{port}"])
        pool = EnginePool("model", settings, engines, lambda welcome: None)
        await pool.start()
        try:
            await body(pool)
        finally:
            await pool.stop()

    asyncio.run(main())


async def until(condition: Callable[[], bool], what: str) -> None:
    try:
        async with asyncio.timeout(20):
            while not condition():
                await asyncio.sleep(0.005)
    except TimeoutError:
        pytest.fail(f"not within 20 s: {what}")
