"""The link under CURVE, over real sockets: who has the right key gets in, all others are told, logged and counted."""

import asyncio
import itertools
import logging
from pathlib import Path

import pytest

from services.engine import gatekeeper
from services.frontend.engines import EnginePool
from services.frontend.metrics.catalogue import HANDSHAKE_FAILURES
from services.frontend.metrics.pools import engine_values
from tests.integration.link_encryption.encrypted_link import (
    OpenEngine,
    close,
    make_keys,
    until,
    with_pool,
)


def test_the_right_key_gets_in(open_engine: OpenEngine, keys: Path) -> None:
    link = open_engine(keys)

    async def body(pool: EnginePool) -> None:
        await until(lambda: pool.ready, "the pool is ready")
        assert (pool.num_refusing, pool.counts.handshake_failures) == (0, 0)

    with_pool(link.port, keys, body)
    assert not any(link.handshake_failures.values())


@pytest.mark.parametrize(
    ("engine_has", "frontend_has", "reason", "engine_says", "frontend_says"),
    [
        pytest.param(
            {"engine.secret": "keys", "frontend.public": "other"},
            {"engine.public": "keys", "frontend.secret": "keys"},
            gatekeeper.UNKNOWN_KEY,
            "A frontend at 127.0.0.1 was turned away: its key is not one of those",
            "it does not let this frontend's key in",
            id="frontend's key is unknown",
        ),
        pytest.param(
            {"engine.secret": "keys", "frontend.public": "keys"},
            {"engine.public": "other", "frontend.secret": "keys"},
            gatekeeper.WRONG_ENGINE_KEY,
            "it takes this engine for one with another key",
            "it has another key than engine.public",
            id="engine's key is another",
        ),
        pytest.param(
            {"engine.secret": "keys", "frontend.public": "keys"},
            None,
            gatekeeper.ENCRYPTION_MISMATCH,
            "this link is encrypted, and its is not",
            "encrypted",
            id="frontend has none",
        ),
        pytest.param(
            None,
            {"engine.public": "keys", "frontend.secret": "keys"},
            None,
            "",
            "this side of the link is encrypted, and the engine's is not",
            id="engine has none",
        ),
    ],
)
def test_who_has_not_the_right_key_is_told_logged_and_counted(
    open_engine: OpenEngine,
    tmp_path: Path,
    keys: Path,
    other_keys: Path,
    caplog: pytest.LogCaptureFixture,
    engine_has: dict[str, str] | None,
    frontend_has: dict[str, str] | None,
    reason: str | None,
    engine_says: str,
    frontend_says: str,
) -> None:
    caplog.set_level(logging.INFO)

    def assemble(name: str, files: dict[str, str] | None) -> Path | None:
        if files is None:
            return None
        folder = tmp_path / name
        folder.mkdir()
        for file, source in files.items():
            (folder / file).write_bytes(((keys if source == "keys" else other_keys) / file).read_bytes())
        return folder

    link = open_engine(assemble("engine", engine_has))

    async def body(pool: EnginePool) -> None:
        await until(lambda: pool.counts.handshake_failures >= 2, "it is tried again, and counted")
        if reason is not None:
            await until(lambda: link.handshake_failures[reason] >= 1, "the engine counts it")
        await until(lambda: frontend_says in caplog.text, "the frontend says why")
        assert not pool.ready
        assert pool.num_refusing == 1
        (failures,) = engine_values("model", pool)[HANDSHAKE_FAILURES].values()
        assert isinstance(failures, int)
        assert failures >= 2

    with_pool(link.port, assemble("frontend", frontend_has), body)
    assert engine_says in caplog.text
    assert len(link.peers) == 0
    for folder in (keys, other_keys):
        for file in folder.iterdir():
            assert file.read_text().strip() not in caplog.text, "a key is in the log"
    told = [record for record in caplog.records if "no link to engine" in record.message]
    assert 1 <= len(told) <= 4, "once for each thing that was found wrong, not for each attempt"


def test_a_refused_frontend_gets_in_once_its_key_is_allowed(
    open_engine: OpenEngine, tmp_path: Path, keys: Path, other_keys: Path
) -> None:
    # libzmq gives a connection up whose handshake failed: the link must begin anew.
    strict = make_keys(tmp_path / "strict")
    for name in ("engine.secret", "engine.public"):
        (strict / name).write_bytes((keys / name).read_bytes())
    first = open_engine(strict)

    async def body(pool: EnginePool) -> None:
        await until(lambda: pool.num_refusing == 1, "the frontend is refused")
        await asyncio.to_thread(close, first)
        open_engine(keys, first.port)
        await until(lambda: pool.ready, "the frontend got in")
        assert pool.num_refusing == 0

    with_pool(first.port, keys, body)


def test_keys_are_rotated_with_old_and_new_side_by_side(open_engine: OpenEngine, tmp_path: Path) -> None:
    old, new = make_keys(tmp_path / "old"), make_keys(tmp_path / "new")

    def both(name: str, first: Path, second: Path) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        for path in first.iterdir():
            (folder / path.name).write_bytes(path.read_bytes() + (second / path.name).read_bytes())
        return folder

    steps = [old, both("step 1", old, new), both("step 2", new, old), new]
    for earlier, later in itertools.pairwise(steps):
        for engine_keys, frontend_keys in ((earlier, later), (later, earlier)):
            link = open_engine(engine_keys)

            async def body(pool: EnginePool) -> None:
                await until(lambda: pool.ready, "pods of both sides of a step speak with each other")
                assert pool.counts.handshake_failures == 0, "a key that is tried in turn is no failure"

            with_pool(link.port, frontend_keys, body)
